// Finding and loading cublasLt.
#include "cuda/cublaslt.h"

#ifndef CADENZA_EMULATED_GPU

#include <dlfcn.h>

#include <string>
#include <vector>

namespace cadenza::cuda {

namespace {

constexpr const char* kNames[] = {"libcublasLt.so.13", "libcublasLt.so.12"};
// Of versions that have these numbers the interface was compared.
constexpr size_t kOldestMajor = 12, kNewestMajor = 13;

std::vector<std::string>& folders() {
  static std::vector<std::string> all;
  return all;
}

void* open_library() {
  for (const char* name : kNames) {
    if (void* found = dlopen(name, RTLD_LAZY | RTLD_NOLOAD)) return found;
  }
  for (const std::string& folder : folders()) {
    for (const char* name : kNames) {
      if (void* found = dlopen((folder + "/" + name).c_str(), RTLD_LAZY)) return found;
    }
  }
  for (const char* name : kNames) {
    if (void* found = dlopen(name, RTLD_LAZY)) return found;
  }
  return nullptr;
}

template <class Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

bool load(lt::Functions& f) {
  void* library = open_library();
  if (library == nullptr || !find(library, "cublasLtGetVersion", f.version)) return false;
  const size_t version = f.version(), major = version / (version < 100000 ? 1000 : 10000);
  return major >= kOldestMajor && major <= kNewestMajor && find(library, "cublasLtCreate", f.create) &&
         find(library, "cublasLtMatmulDescCreate", f.create_product) &&
         find(library, "cublasLtMatmulDescSetAttribute", f.set_product) &&
         find(library, "cublasLtMatrixLayoutCreate", f.create_matrix) &&
         find(library, "cublasLtMatmulPreferenceCreate", f.create_preference) &&
         find(library, "cublasLtMatmulPreferenceSetAttribute", f.set_preference) &&
         find(library, "cublasLtMatmulAlgoGetHeuristic", f.find) &&
         find(library, "cublasLtMatmulAlgoCheck", f.check) &&
         find(library, "cublasLtMatmulAlgoConfigGetAttribute", f.get_algorithm) &&
         find(library, "cublasLtMatmulAlgoConfigSetAttribute", f.set_algorithm) &&
         find(library, "cublasLtMatmul", f.multiply);
}

}  // namespace

void search_cublaslt_in(const char* folder) { folders().emplace_back(folder); }

const lt::Functions* cublaslt() {
  static lt::Functions functions;
  static const bool is_loaded = load(functions);
  return is_loaded ? &functions : nullptr;
}

}  // namespace cadenza::cuda

#endif
