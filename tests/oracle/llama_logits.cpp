// Logits of llama.cpp: llama_logits MODEL TOKENS CHUNK OUT
//
// TOKENS has int32 ids. Each CHUNK of them is a sequence of its own, of which OUT gets the float32
// logits after the tokens [CHUNK / 2, CHUNK - 1), as llama-perplexity scores them.

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "llama.h"

namespace {

std::vector<llama_token> read_tokens(const char* path) {
  std::vector<llama_token> tokens(1 << 20);
  FILE* file = std::fopen(path, "rb");
  if (file == nullptr) std::exit(2);
  tokens.resize(std::fread(tokens.data(), sizeof(llama_token), tokens.size(), file));
  std::fclose(file);
  return tokens;
}

bool decode(llama_context* context, const llama_token* tokens, int chunk) {
  llama_memory_clear(llama_get_memory(context), true);
  llama_batch batch = llama_batch_init(chunk, 0, 1);
  batch.n_tokens = chunk;
  for (int i = 0; i < chunk; i++) {
    batch.token[i] = tokens[i];
    batch.pos[i] = i;
    batch.n_seq_id[i] = 1;
    batch.seq_id[i][0] = 0;
    batch.logits[i] = i >= chunk / 2 && i < chunk - 1;
  }
  const bool is_done = llama_decode(context, batch) == 0;
  llama_batch_free(batch);
  return is_done;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  llama_backend_init();
  llama_model* model = llama_model_load_from_file(argv[1], llama_model_default_params());
  if (model == nullptr) return 1;
  const std::vector<llama_token> tokens = read_tokens(argv[2]);
  const int chunk = std::atoi(argv[3]);
  llama_context_params params = llama_context_default_params();
  params.n_ctx = params.n_batch = params.n_ubatch = chunk;
  llama_context* context = llama_init_from_model(model, params);
  if (context == nullptr) return 1;
  const int vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
  FILE* out = std::fopen(argv[4], "wb");
  if (out == nullptr) return 2;
  for (size_t at = 0; at + chunk <= tokens.size(); at += chunk) {
    if (!decode(context, tokens.data() + at, chunk)) return 1;
    for (int i = chunk / 2; i < chunk - 1; i++) {
      std::fwrite(llama_get_logits_ith(context, i), sizeof(float), vocab, out);
    }
  }
  return std::fclose(out) == 0 ? 0 : 1;
}
