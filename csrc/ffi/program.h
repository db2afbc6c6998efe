// A program: operations that one call of XLA's runs in order, over arrays that its words describe.
// A library that defines the operations of calls.h gives it a handler (ffi/program.cpp,
// cuda/program.cu).
#pragma once

#include <cstring>
#include <iterator>
#include <string>
#include <vector>

#include "ffi/calls.h"

namespace cadenza::xla_ffi {

// The arrays of a program: an absent one, the operands, the results, then those within the last
// result, which is the program's scratch memory.
class Values {
 public:
  Values(ffi::RemainingArgs args, ffi::RemainingRets rets) {
    all_.reserve(1 + args.size() + rets.size());
    all_.push_back(absent());
    for (size_t i = 0; i < args.size(); i++) all_.push_back(args.get<Any>(i).value());
    for (size_t i = 0; i < rets.size(); i++) all_.push_back(*rets.get<Any>(i).value());
  }

  // Arrays of which only the shapes are known.
  explicit Values(const std::vector<XLA_FFI_Buffer>& buffers) {
    all_.push_back(absent());
    for (const XLA_FFI_Buffer& buffer : buffers) all_.emplace_back(&buffer);
  }

  // `words` holds offset, type, rank and dimensions of each array within the scratch memory.
  void add_scratch(ffi::Span<const int64_t> words) {
    const Any scratch = all_.back();
    for (const int64_t* at = words.begin(); at + 3 <= words.end(); at += 3 + at[2]) {
      within_.push_back({sizeof(XLA_FFI_Buffer), nullptr, type_of(at[1]),
                         static_cast<char*>(scratch.untyped_data()) + at[0], at[2],
                         const_cast<int64_t*>(at + 3)});
      int64_t end = at[0] + int64_t(Any(&within_.back()).size_bytes());
      require(at[0] >= 0 && end <= int64_t(scratch.size_bytes()),
              "an array does not fit the scratch memory");
    }
    all_.reserve(all_.size() + within_.size());
    for (const XLA_FFI_Buffer& buffer : within_) all_.emplace_back(&buffer);
  }

  const Any& at(int64_t index) const { return all_.at(size_t(index)); }
  const Any& last() const { return all_.back(); }

  // Where the arrays are, and their types and shapes.
  std::vector<int64_t> description() const {
    std::vector<int64_t> found;
    for (const Any& each : all_) {
      const auto shape = each.dimensions();
      found.insert(found.end(), {int64_t(reinterpret_cast<intptr_t>(each.untyped_data())),
                                 int64_t(each.element_type()), int64_t(shape.size())});
      found.insert(found.end(), shape.begin(), shape.end());
    }
    return found;
  }

 private:
  static XLA_FFI_DataType type_of(int64_t code) {
    require(code >= 0 && code <= 2, "the type of a scratch array must be 0, 1 or 2");
    return code == 0 ? XLA_FFI_DataType_BF16
                     : (code == 1 ? XLA_FFI_DataType_F32 : XLA_FFI_DataType_S32);
  }

  std::vector<Any> all_;
  std::vector<XLA_FFI_Buffer> within_;
};

// The words of an operation: the index of each array, and the bits of each attribute.
class Words {
 public:
  Words(const Values& values, const int64_t* at) : values_(values), at_(at) {}

  const Any& array() { return values_.at(integer()); }
  int64_t integer() { return *at_++; }
  float real() {
    const int64_t word = integer();
    float value;
    std::memcpy(&value, &word, sizeof(value));
    return value;
  }
  bool flag() { return integer() != 0; }

 private:
  const Values& values_;
  const int64_t* at_;
};

#define OPERAND(name) words.array(),
#define RESULT(name) words.array(),
#define INTEGER(name) words.integer(),
#define FLOAT(name) words.real(),
#define FLAG(name) words.flag(),
#define OPERATION(name, parameters) \
  inline void execute_##name(Words words) { execute(calls::name{parameters}); }
#include "core/operation_list.h"

struct Operation {
  const char* name;
  const char* signature;  // the name, then the names of the attributes in order
  void (*execute)(Words words);
  int64_t num_parameters;
};

#define OPERAND(name)
#define RESULT(name)
#define INTEGER(name) " " #name
#define FLOAT(name) " " #name
#define FLAG(name) " " #name
#define OPERATION(name, parameters) constexpr const char* signature_of_##name = #name parameters;
#include "core/operation_list.h"

inline constexpr Operation kOperations[] = {
#define OPERAND(name) +1
#define RESULT(name) +1
#define INTEGER(name) +1
#define FLOAT(name) +1
#define FLAG(name) +1
#define OPERATION(name, parameters) \
  {"cadenza_" #name, signature_of_##name, execute_##name, 0 parameters},
#include "core/operation_list.h"
};

// Runs operations over their arrays; returns the first error.
inline ffi::Error run_operations(const Values& values, ffi::Span<const int64_t> operations) {
  ffi::Error error = ffi::Error::Success();
  constexpr auto kNumOperations = int64_t(std::size(kOperations));
  for (const int64_t* at = operations.begin(); at + 2 <= operations.end(); at += 2 + at[1]) {
    require(at[0] >= 0 && at[0] < kNumOperations, "no operation has this index");
    const Operation& each = kOperations[at[0]];
    require(at[1] == each.num_parameters && at + 2 + at[1] <= operations.end(),
            "an operation has another number of parameters");
    error = guarded(each.name, [&] { each.execute({values, at + 2}); });
    if (error.failure()) break;
  }
  return error;
}

// The signatures of kOperations, one a line.
inline const char* program_operations() {
  static const std::string lines = [] {
    std::string joined;
    for (const Operation& each : kOperations) joined += std::string(each.signature) + "\n";
    return joined;
  }();
  return lines.c_str();
}

}  // namespace cadenza::xla_ffi
