// Where the pages of large, long-lived memory are: weights and KV.
#pragma once

#include <cstddef>
#include <vector>

namespace cadenza {

// Asks for large pages for [data, data + bytes), and that they are spread over `nodes` in turn if
// there are several: each thread reads all nodes alike, wherever it runs and whichever panels it
// takes. Pages that were written before are moved. Returns whether memory is spread; a system that
// refuses leaves it as it is.
bool place_pages(void* data, size_t bytes, const std::vector<int>& nodes);

// The nodes over which this process spreads its memory: those of its CPUs; none if there is only
// one, or if the process was started with a policy of its own, as by numactl.
const std::vector<int>& nodes_to_spread_over();

}  // namespace cadenza
