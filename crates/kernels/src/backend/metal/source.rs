//! The text of all Metal kernels, as one library of a device has it.

const HEADER: &str = include_str!("common.metal.h");

const SOURCES: [&str; 27] = [
    include_str!("kernel.metal"),
    // What products read of matrices in fewer bits.
    include_str!("../../quantized/kernel.metal"),
    include_str!("product.metal"),
    // What the optimisers share.
    include_str!("../../flat/kernel.metal"),
    include_str!("../../adamw/kernel.metal"),
    include_str!("../../adafactor/kernel.metal"),
    include_str!("../../adamw8bit/kernel.metal"),
    include_str!("../../arithmetic/kernel.metal"),
    include_str!("../../attention/kernel.metal"),
    include_str!("../../attention/paged/rounded/kernel.metal"),
    include_str!("../../copy/kernel.metal"),
    include_str!("../../cross_entropy/kernel.metal"),
    include_str!("../../dora/kernel.metal"),
    include_str!("../../embedding/kernel.metal"),
    include_str!("../../experts/kernel.metal"),
    include_str!("../../glu/kernel.metal"),
    include_str!("../../layer_norm/kernel.metal"),
    include_str!("../../lion/kernel.metal"),
    include_str!("../../lora_linear/kernel.metal"),
    include_str!("../../lora_rows/kernel.metal"),
    include_str!("../../matmul/kernel.metal"),
    include_str!("../../muon/kernel.metal"),
    include_str!("../../rms_norm/kernel.metal"),
    include_str!("../../rope/kernel.metal"),
    include_str!("../../sampling/kernel.metal"),
    include_str!("../../sgd/kernel.metal"),
    include_str!("../../softmax/kernel.metal"),
];

/// The header and the operations' kernels, with nothing left to include but Metal's own library.
pub(crate) fn source() -> String {
    let mut text: String = HEADER.replace("#pragma once\n", "");
    for source in SOURCES {
        text.push_str(&source.replace("#include \"common.metal.h\"\n", ""));
    }
    text
}
