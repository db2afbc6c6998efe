// A program: operations that one call of XLA's runs in order, over arrays that its words describe.
// A library that defines the operations of targets.h gives it a handler (ffi/program.cpp,
// cuda/program.cu).
#pragma once

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "ffi/targets.h"

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

// A parameter of an operation from its word: the index of an array, or an attribute's bits.
template <class P>
P parameter(const Values& values, int64_t word) {
  if constexpr (std::is_same_v<P, Any> || std::is_same_v<P, AnyResult>) {
    return values.at(word);
  } else if constexpr (std::is_same_v<P, float>) {
    float value;
    std::memcpy(&value, &word, sizeof(value));
    return value;
  } else {
    return static_cast<P>(word);
  }
}

template <auto Body>
struct Call;

template <class... P, ffi::Error (*Body)(P...)>
struct Call<Body> {
  static constexpr int64_t kParameters = sizeof...(P);

  static ffi::Error run(const Values& values, const int64_t* words) {
    return run(values, words, std::index_sequence_for<P...>{});
  }

 private:
  template <size_t... I>
  static ffi::Error run(const Values& values, const int64_t* words, std::index_sequence<I...>) {
    return Body(parameter<P>(values, words[I])...);
  }
};

struct Operation {
  const char* signature;  // its name, then the names of its attributes in order
  int64_t num_parameters;
  ffi::Error (*run)(const Values& values, const int64_t* words);
};

template <auto Body>
constexpr Operation operation(const char* signature) {
  return {signature, Call<Body>::kParameters, Call<Body>::run};
}

inline constexpr Operation kOperations[] = {
    operation<embed_call>("embed vocab scale"),
    operation<rms_norm_call>("rms_norm eps"),
    operation<rms_norm_add_call>("rms_norm_add eps"),
    operation<convert_call>("convert"),
    operation<take_rows_call>("take_rows"),
    operation<reserve_call>("reserve"),
    operation<linear_call>("linear scale"),
    operation<gated_linear_call>("gated_linear activation"),
    operation<route_experts_call>(
        "route_experts experts over_chosen sigmoid groups chosen_groups scale least_sum"),
    operation<grouped_gated_linear_call>("grouped_gated_linear activation"),
    operation<grouped_linear_call>("grouped_linear"),
    operation<rope_append_attend_call>(
        "rope_append_attend layer heads scale window soft_cap norm_eps norms_values"),
    operation<latent_attend_call>("latent_attend layer heads scale norm_eps pairs_neighbours"),
    operation<score_keys_call>("score_keys layer heads scale soft_cap norm_eps is_first is_last"),
    operation<head_linear_call>("head_linear width"),
    operation<gated_delta_call>("gated_delta layer key_heads tiled norm_eps"),
    operation<short_conv_call>("short_conv layer"),
    operation<selective_scan_call>("selective_scan layer groups norm_eps"),
    operation<gate_inputs_call>("gate_inputs first activation"),
    operation<layer_norm_call>("layer_norm eps"),
    operation<activate_call>("activate kind"),
    operation<keep_heads_call>("keep_heads norm_eps norms_values"),
    operation<encode_attend_call>("encode_attend scale"),
    operation<keep_rows_call>("keep_rows part"),
    operation<place_rows_call>("place_rows part adds"),
    operation<next_token_call>("next_token vocab divisor soft_cap page_size banned"),
};

// Runs operations over their arrays; returns the first error.
inline ffi::Error run_operations(const Values& values, ffi::Span<const int64_t> operations) {
  ffi::Error error = ffi::Error::Success();
  constexpr int64_t kNumOperations = sizeof(kOperations) / sizeof(*kOperations);
  for (const int64_t* at = operations.begin(); at + 2 <= operations.end(); at += 2 + at[1]) {
    require(at[0] >= 0 && at[0] < kNumOperations, "no operation has this index");
    const Operation& each = kOperations[at[0]];
    require(at[1] == each.num_parameters && at + 2 + at[1] <= operations.end(),
            "an operation has another number of parameters");
    error = each.run(values, at + 2);
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
