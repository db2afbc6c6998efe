// What a program gives to each operation: calls::<name> has its arrays and attributes
// (core/operation_list.h), and a library defines what it executes. Bodies throw where these do not fit.
#pragma once

#include "ffi/buffers.h"

namespace cadenza::xla_ffi {

namespace calls {

#define OPERAND(name) Any name;
#define RESULT(name) Any name;
#define INTEGER(name) int64_t name;
#define FLOAT(name) float name;
#define FLAG(name) bool name;
#define OPERATION(name, parameters)    \
  struct name {                        \
    static constexpr Op kOp = Op::name; \
    parameters                         \
  };
#include "core/operation_list.h"

}  // namespace calls

#define OPERATION(name, parameters) void execute(const calls::name& c);
#include "core/operation_list.h"

}  // namespace cadenza::xla_ffi
