"""The gate behind `cadenza verify`: the same requests alone and together, compared bit for bit."""
