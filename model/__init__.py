"""The transformer: config, weights, families, attention kernels, tokenizer, sampling."""
