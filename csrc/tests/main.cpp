// Runs every test for every ISA of this machine: tests [--quick] [--isa NAME] [--only TEXT]
#include <cstring>

#include "tests/check.h"

namespace cadenza::tests {

std::vector<Test>& registry() {
  static std::vector<Test> tests;
  return tests;
}

namespace {

void run_all(const std::string& isa, bool quick, const char* only) {
  Context context{kernels_for(isa), quick, {}, ""};
  for (int threads = 1; threads <= 3; threads++) {
    context.executors.push_back(std::make_unique<Executor>(threads));
  }
  int count = 0;
  for (const Test& test : registry()) {
    if (std::strstr(test.name, only) == nullptr) continue;
    std::printf("%s %s\n", isa.c_str(), test.name);
    std::fflush(stdout);
    test.run(context);
    count++;
  }
  std::printf("%s: %d tests passed\n", isa.c_str(), count);
}

}  // namespace
}  // namespace cadenza::tests

int main(int argc, char** argv) {
  bool quick = false;
  const char *only = "", *isa = nullptr;
  for (int i = 1; i < argc; i++) {
    if (std::strcmp(argv[i], "--quick") == 0) quick = true;
    if (std::strcmp(argv[i], "--isa") == 0 && i + 1 < argc) isa = argv[++i];
    if (std::strcmp(argv[i], "--only") == 0 && i + 1 < argc) only = argv[++i];
  }
  for (const std::string& name : cadenza::available_isas()) {
    if (isa == nullptr || name == isa) cadenza::tests::run_all(name, quick, only);
  }
  return 0;
}
