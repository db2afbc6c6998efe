// C entry points for ctypes: configuration, packing, and the ISA and threads in use.
#include <algorithm>
#include <exception>
#include <stdexcept>
#include <string>

#include "core/code_format.h"
#include "core/faults.h"
#include "core/float8.h"
#include "core/cpu.h"
#include "core/isa.h"
#include "core/logit_rows.h"
#include "core/memory_pages.h"
#include "core/pack.h"

namespace {

// Runs a body; returns null, or an error message valid until this thread's next call.
template <class Body>
const char* guarded(Body&& body) {
  thread_local std::string message;
  try {
    body();
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ",") + name;
  return text;
}

}  // namespace

#ifdef CADENZA_FAULTS
std::atomic<cadenza::Fault> cadenza::injected_fault{cadenza::Fault::kNone};
#endif

// The library is compiled with -fvisibility=hidden.
#define CADENZA_EXPORT __attribute__((visibility("default")))

extern "C" {

// Selects the ISA and starts the threads. An error names the invalid environment variable.
CADENZA_EXPORT const char* cadenza_configure() {
  return guarded([] {
    cadenza::kernels();
    const auto tile_rows = cadenza::integer_kernels().least_tile_rows;
    if (tile_rows != nullptr) tile_rows();
    cadenza::executor();
  });
}

CADENZA_EXPORT const char* cadenza_cpu_isa() { return cadenza::kernels().isa; }

CADENZA_EXPORT const char* cadenza_portable_isa() { return cadenza::portable_kernels().isa; }

CADENZA_EXPORT const char* cadenza_cpu_integer_isa() { return cadenza::integer_kernels().isa; }

// Comma-separated, best first.
CADENZA_EXPORT const char* cadenza_available_isas() {
  static const std::string names = joined(cadenza::available_isas());
  return names.c_str();
}

CADENZA_EXPORT const char* cadenza_available_integer_isas() {
  static const std::string names = joined(cadenza::available_integer_isas());
  return names.c_str();
}

// A sentence if the CPU has tile instructions that cannot be used; else empty.
CADENZA_EXPORT const char* cadenza_refusal_of_tiles() {
  static const std::string reason = cadenza::refusal_of_tiles();
  return reason.c_str();
}

// From how many rows products with quantised weights use tiles: of all formats, as "8", "4 to 16" or
// "never"; empty without tiles.
CADENZA_EXPORT const char* cadenza_tile_rows() {
  static const std::string text = [] {
    const auto tile_rows = cadenza::integer_kernels().least_tile_rows;
    if (tile_rows == nullptr) return std::string();
    const auto [least, most] = std::minmax_element(tile_rows(), tile_rows() + cadenza::kNumCodeFormats);
    const auto name = [](int rows) {
      return rows == cadenza::kNeverByTiles ? std::string("never") : std::to_string(rows);
    };
    return *least == *most ? name(*least) : name(*least) + " to " + name(*most);
  }();
  return text.c_str();
}

CADENZA_EXPORT const char* cadenza_logit_columns() { return cadenza::kLogitColumnNames; }

CADENZA_EXPORT int cadenza_num_threads() { return cadenza::executor().num_threads(); }

// Places the pages of memory that holds weights (core/memory_pages.h).
CADENZA_EXPORT void cadenza_place_pages(void* data, int64_t bytes) {
  cadenza::place_pages(data, size_t(bytes), cadenza::nodes_to_spread_over());
}

CADENZA_EXPORT int64_t cadenza_packed_bytes(int64_t n, int64_t k, int dtype, int gated) {
  return cadenza::packed_bytes(n, k, static_cast<cadenza::DType>(dtype), gated != 0);
}

// Source i is [rows[i], k] at data[i], with a row stride of strides[i] elements.
CADENZA_EXPORT const char* cadenza_pack(int num_sources, const void* const* data, const int* dtypes,
                                        const int64_t* rows, const int64_t* strides, int64_t k,
                                        void* packed, int packed_dtype, int gated) {
  return guarded([&] {
    cadenza::PackTask task{{}, k, packed, static_cast<cadenza::DType>(packed_dtype), gated != 0};
    for (int i = 0; i < num_sources; i++) {
      task.sources.push_back(
          {data[i], static_cast<cadenza::DType>(dtypes[i]), rows[i], strides[i]});
    }
    cadenza::pack(cadenza::executor(), task);
  });
}

// A weight [rows, k] with a row stride in elements: floats that are quantised, signed codes of a byte
// with scales, or blocks of ggml's type `blocks` with a row stride in bytes, otherwise -1
// (core/pack.h). Formats are those of cadenza_code_format.
struct CadenzaCodeSource {
  const void* data;
  const void* scales;
  const void* corrections;
  int64_t rows, row_stride, paired_heads;
  int32_t dtype, format, target, blocks;
};

// The index of the format of codes with these properties (core/code_format.h), or -1.
CADENZA_EXPORT int cadenza_code_format(int bits, int group, int scale, int correction) {
  return cadenza::index_of(cadenza::CodeFormat{bits, group, static_cast<cadenza::ScaleType>(scale),
                                               static_cast<cadenza::Correction>(correction)});
}

// `order` is that of the inputs [k], which the codes have, or null.
CADENZA_EXPORT const char* cadenza_pack_quantised(int num_sources, const CadenzaCodeSource* sources,
                                                  int64_t k, const int32_t* order, void* packed,
                                                  int64_t packed_bytes, int gated) {
  return guarded([&] {
    cadenza::QuantisedPackTask task{{},           k, static_cast<uint8_t*>(packed), packed_bytes,
                                    gated != 0, order};
    for (int i = 0; i < num_sources; i++) {
      const CadenzaCodeSource& each = sources[i];
      cadenza::PackSource rows{each.data, static_cast<cadenza::DType>(each.dtype), each.rows,
                               each.row_stride};
      const cadenza::BlockType* blocks = cadenza::find_block_type(each.blocks);
      if (each.blocks >= 0 && blocks == nullptr) {
        throw std::invalid_argument("pack: blocks of an unknown type");
      }
      task.sources.push_back({rows, each.target, each.format, each.scales, each.corrections, blocks,
                              each.paired_heads});
    }
    cadenza::pack_quantised(cadenza::executor(), task);
  });
}

// Source i is e4m3 codes [rows[i], k] at codes[i], with a row stride of strides[i] bytes, and their
// f32 scales [rows[i], blocks of k].
CADENZA_EXPORT const char* cadenza_pack_float8(int num_sources, const uint8_t* const* codes,
                                               const float* const* scales, const int64_t* rows,
                                               const int64_t* strides, int64_t k, void* packed,
                                               int gated) {
  return guarded([&] {
    cadenza::Float8PackTask task{{}, k, static_cast<uint8_t*>(packed), gated != 0};
    for (int i = 0; i < num_sources; i++) {
      task.sources.push_back({codes[i], rows[i], strides[i], scales[i]});
    }
    cadenza::pack_float8(cadenza::executor(), task);
  });
}

#ifdef CADENZA_FAULTS
// Injects a fault into the kernels from the next step on; 0 removes it.
CADENZA_EXPORT void cadenza_inject_fault(int fault) {
  cadenza::injected_fault = static_cast<cadenza::Fault>(fault);
}
#endif

}  // extern "C"
