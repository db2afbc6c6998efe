// Prints the instruction sets that this CPU can run: a line of floats, a line of integers, fastest
// first. A build runs it to choose what it compiles.
#include <cstdio>

#include "core/cpu.h"

static void print(const std::vector<std::string>& isas) {
  for (const std::string& isa : isas) std::printf("%s ", isa.c_str());
  std::printf("\n");
}

int main() {
  print(cadenza::isas_of_cpu());
  print(cadenza::integer_isas_of_cpu());
}
