"""Pages, prefixes, recurrent states and image slots: who holds them, and who finds them again.

Modules:

- `page_pool`: allocates and frees pages; the order of eviction
- `page_keys`: chained keyed hashes of pages, and which of them are in the cache
- `prefix_cache`: finds pages by their keys, and the sequence that computes shared ones
- `prefix_misses`: why tokens of a prompt were not in the cache, and where a look-up ended
- `recurrent_states`: slots of recurrent states, and snapshots of them after pages of the cache
- `sequence_states`: the recurrent states of sequences: opened, placed, published
- `slot_prefixes`: finds slots whose sequence began alike, where a page is a slot
- `kv_cache_manager`: pages of sequences: sharing, growing, publishing, releasing; `PageStore`
- `image_slots`: where embeddings of images are on the device; eviction
- `page_quotas`: how many pages each tenant holds, has in the prefix cache, and may
"""
