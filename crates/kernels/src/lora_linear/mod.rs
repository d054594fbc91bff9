//! lora_linear
