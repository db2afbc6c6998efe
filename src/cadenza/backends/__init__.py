"""Implementations of the runner contract, one package a platform, and the contract itself."""
