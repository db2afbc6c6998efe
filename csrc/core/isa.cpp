#include "core/isa.h"

#include <cstdlib>
#include <stdexcept>

#include "core/cpu.h"

// The build lists the tables that it links, as CADENZA_TABLES(X) X(avx512) X(scalar) …
#if !defined(CADENZA_TABLES) || !defined(CADENZA_INTEGER_TABLES)
#error "setup.py and csrc/Makefile define the tables that are compiled"
#endif

namespace cadenza {

#define CADENZA_DECLARE(isa) const KernelTable& isa##_kernels();
CADENZA_TABLES(CADENZA_DECLARE)
#undef CADENZA_DECLARE
#define CADENZA_DECLARE(isa) extern const IntegerKernels int8_##isa##_kernels;
CADENZA_INTEGER_TABLES(CADENZA_DECLARE)
#undef CADENZA_DECLARE
#ifdef CADENZA_EMULATED_TILES
const KernelTable& amx_emulated_kernels();
extern const IntegerKernels int8_amx_emulated_kernels;
#endif

namespace {

// A table of kernels and its ISA; the table is asked for only where the CPU runs that ISA.
template <class Table>
struct Compiled {
  const char* isa;
  const Table& (*table)();
};

#define CADENZA_COMPILED(isa) {#isa, isa##_kernels},
const Compiled<KernelTable> kTables[] = {CADENZA_TABLES(CADENZA_COMPILED)};
#undef CADENZA_COMPILED
#define CADENZA_COMPILED(isa) \
  {#isa, []() -> const IntegerKernels& { return int8_##isa##_kernels; }},
const Compiled<IntegerKernels> kIntegerTables[] = {CADENZA_INTEGER_TABLES(CADENZA_COMPILED)};
#undef CADENZA_COMPILED

// The tables of `compiled` whose ISA is in `isas`, in the order of `isas`.
template <class Table, size_t N>
std::vector<const Table*> runnable(const Compiled<Table> (&compiled)[N],
                                   const std::vector<std::string>& isas) {
  std::vector<const Table*> tables;
  for (const std::string& isa : isas) {
    for (const Compiled<Table>& each : compiled) {
      if (isa == each.isa) tables.push_back(&each.table());
    }
  }
  return tables;
}
std::vector<const KernelTable*> tables() {
  std::vector<const KernelTable*> found = runnable(kTables, isas_of_cpu());
#ifdef CADENZA_EMULATED_TILES
  found.push_back(&amx_emulated_kernels());  // of tests; last, since it is slow
#endif
  return found;
}
std::vector<const IntegerKernels*> integer_tables() {
  std::vector<const IntegerKernels*> found = runnable(kIntegerTables, integer_isas_of_cpu());
#ifdef CADENZA_EMULATED_TILES
  found.push_back(&int8_amx_emulated_kernels);
#endif
  return found;
}

template <class Table>
std::vector<std::string> names_of(const std::vector<const Table*>& tables) {
  std::vector<std::string> names;
  for (const Table* table : tables) names.push_back(table->isa);
  return names;
}

// "variable is 'name'; …", with the names that were compiled and can run.
[[noreturn]] void refuse(const char* variable, const std::string& name,
                         const std::vector<std::string>& choices) {
  std::string listed;
  for (const std::string& choice : choices) listed += (listed.empty() ? "" : ", ") + choice;
  throw std::invalid_argument(std::string(variable) + " is '" + name +
                              "'; this machine can run: " + listed +
                              ", of those that were built (CADENZA_BUILD_ISAS=all builds all)");
}

// A variable of the environment; empty if it is not set.
std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// Bits of an ISA's vectors; 0 for scalar kernels.
int vector_bits(const std::string& isa) {
  if (isa.rfind("avx512", 0) == 0 || has_tiles(isa)) return 512;
  if (isa.rfind("avx", 0) == 0) return 256;
  return isa.rfind("neon", 0) == 0 ? 128 : 0;
}

}  // namespace

std::vector<std::string> available_isas() { return names_of(tables()); }

const KernelTable& kernels_for(const std::string& name) {
  for (const KernelTable* table : tables()) {
    if (name.empty() || name == table->isa) return *table;
  }
  refuse("CADENZA_CPU_ISA", name, available_isas());
}

const KernelTable& kernels() {
  static const KernelTable* const chosen = &kernels_for(environment("CADENZA_CPU_ISA"));
  return *chosen;
}

const KernelTable& portable_kernels() {
  static const KernelTable* const chosen = [] {
    const KernelTable* first = &kernels();
    if (!has_bf16_instructions(first->isa)) return first;
    for (const KernelTable* table : tables()) {
      if (!has_bf16_instructions(table->isa)) return table;
    }
    return &scalar_kernels();
  }();
  return *chosen;
}

std::vector<std::string> available_integer_isas() { return names_of(integer_tables()); }

const IntegerKernels& integer_kernels_for(const std::string& name, const std::string& isa) {
  for (const IntegerKernels* table : integer_tables()) {
    const std::string own = table->isa;
    if (own == name) return *table;
    if (name.empty() && vector_bits(own) <= vector_bits(isa)) return *table;
  }
  refuse("CADENZA_CPU_INTEGER_ISA", name, available_integer_isas());
}

const IntegerKernels& integer_kernels() {
  static const IntegerKernels* const chosen =
      &integer_kernels_for(environment("CADENZA_CPU_INTEGER_ISA"), kernels().isa);
  return *chosen;
}

}  // namespace cadenza
