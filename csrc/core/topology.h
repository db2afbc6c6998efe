// What the system says of its cores and memory nodes, in files below a root that tests replace.
#pragma once

#include <string>
#include <vector>

namespace cadenza {

// The content of a file; empty if it cannot be read.
std::string read_text(const std::string& path);

// The numbers of a list such as "0-3,8"; what follows something else is left out.
std::vector<int> numbers_of_list(const std::string& text);

// The CPUs on which this process may run, in ascending order; empty where the system does not say.
std::vector<int> allowed_cpus();

// How many threads compute on `cpus` without disturbing each other: one for each core, or one for
// each CPU where these are fewer than kMinCores cores.
constexpr int kMinCores = 4;
int threads_of_cpus(const std::string& root, const std::vector<int>& cpus);

// The memory nodes that have some of `cpus` and memory that this process may use.
std::vector<int> nodes_of_cpus(const std::string& root, const std::vector<int>& cpus);

}  // namespace cadenza
