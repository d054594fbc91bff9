//! Fused operations with backward passes for fine-tuning language models on Candle.
