"""Pages, prefixes, recurrent states and image slots: who holds them, and who finds them again.

Modules:

- `page_pool`: allocates and frees pages; the order of eviction; how many each tenant may have
- `page_keys`: chained keyed hashes of pages, and which of them are in the cache
- `prefix_cache`: finds pages by their keys, slots that begin alike, and who computes shared pages
- `prefix_misses`: why tokens of a prompt were not in the cache, and where a look-up ended
- `recurrent_states`: slots of recurrent states of sequences, and snapshots after cached pages
- `kv_cache_manager`: pages of sequences: sharing, growing, publishing, releasing; `PageStore`
- `image_slots`: where embeddings of images are on the device; eviction
"""
