// A minimal test framework: a test is a function of a Context and runs once for each ISA.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "core/cpu.h"
#include "core/isa.h"
#include "core/ops.h"
#include "core/pack.h"

namespace cadenza::tests {

struct Context {
  const KernelTable& kernels;
  bool quick;                                        // fewer sizes, for emulators and sanitizers
  std::vector<std::unique_ptr<Executor>> executors;  // of 1, 2 and 3 threads
  std::string integer_isa = "";                      // empty: the one chosen beside `kernels`

  Runtime runtime(size_t which = 0) const {
    return {kernels, integer_kernels_for(integer_isa, kernels.isa), *executors[which]};
  }
};

using TestFn = void (*)(const Context&);

struct Test {
  const char* name;
  TestFn run;
};

std::vector<Test>& registry();

struct Register {
  Register(const char* name, TestFn run) { registry().push_back({name, run}); }
};

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  std::printf("\n  FAILED %s:%d: %s\n", file, line, what.c_str());
  std::exit(1);
}

#define TEST(name)                                    \
  static void name(const Context&);                   \
  static const Register register_##name(#name, name); \
  static void name([[maybe_unused]] const Context& context)

#define CHECK(condition) \
  if (!(condition)) fail(__FILE__, __LINE__, #condition)

#define CHECK_NEAR(a, b, tolerance)                      \
  if (!(std::abs(double(a) - double(b)) <= (tolerance))) \
  fail(__FILE__, __LINE__,                               \
       std::string(#a " is ") + std::to_string(a) + ", expected " + std::to_string(b))

}  // namespace cadenza::tests
