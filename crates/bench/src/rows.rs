//! The rows of the benchmark: what each computes, from which inputs, and what it costs at least.

use crate::shapes;
use candle_core::{DType, Device, Tensor};
use metal_candle::engine::EngineOptions;
use metal_candle::model::Quantization;
use metal_candle::random::SplitMix64;
use metal_candle::{Error, Result};
use metal_candle_kernels::quantized::Format;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;

/// What the low-rank path is multiplied by in every row: alpha is twice the rank.
pub const LORA_SCALE: f64 = 2.0;
/// Added to the mean square or the variance in every norm.
pub const EPSILON: f64 = 1e-5;
/// The L2 norm that gradients are clipped to.
pub const CLIP_NORM: f64 = 1.0;
/// The learning rate of every optimiser step.
pub const LEARNING_RATE: f64 = 1e-4;
/// The weight decay of every optimiser step.
pub const WEIGHT_DECAY: f64 = 0.01;

/// Rows of a quantised matrix that are made up, the others are the same again.
pub const QUANTIZED_ROWS: usize = 64;
/// Copies of a quantised matrix that calls read in turn, as no cache holds all layers of a model.
pub const QUANTIZED_COPIES: usize = 8;

/// Which way through an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pass {
    /// Inputs to outputs.
    Forward,
    /// The gradient of the outputs to those of the inputs.
    Backward,
}

/// The dtype of a model's weights and activations.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    /// 32-bit float.
    #[default]
    F32,
    /// Brain float, 16 bits.
    Bf16,
}

impl Precision {
    /// Candle's name for it.
    pub fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 => DType::BF16,
        }
    }

    /// As rows are named.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        }
    }
}

/// How a frozen matrix is quantised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Packing {
    /// NF4 in blocks of 64, with double quantisation.
    Nf4,
    /// ggml's Q4_K.
    Q4K,
    /// ggml's Q6_K.
    Q6K,
    /// ggml's Q8_0.
    Q8_0,
    /// MLX's 4 bits in groups of 64.
    Affine4,
}

impl Packing {
    /// All that are timed.
    pub const ALL: [Self; 5] = [Self::Nf4, Self::Q4K, Self::Q6K, Self::Q8_0, Self::Affine4];

    /// As rows are named.
    pub fn name(self) -> &'static str {
        match self {
            Self::Nf4 => "nf4",
            Self::Q4K => "q4_k",
            Self::Q6K => "q6_k",
            Self::Q8_0 => "q8_0",
            Self::Affine4 => "mlx4",
        }
    }

    /// As it is quantised.
    pub fn format(self) -> Format {
        match self {
            Self::Nf4 => Format::Nf4 { block: 64, nested: true },
            Self::Q4K => Format::Q4K,
            Self::Q6K => Format::Q6K,
            Self::Q8_0 => Format::Q8_0,
            Self::Affine4 => Format::Affine { bits: 4, group: 64 },
        }
    }

    /// Bits of an element with its share of the scales.
    fn bits(self) -> f64 {
        match self {
            Self::Nf4 => 4.0 + 8.0 / 64.0 + 32.0 / (64.0 * 256.0),
            Self::Q4K => 4.0 + 16.0 / 32.0 + 32.0 / 256.0,
            Self::Q6K => 6.0 + 8.0 / 16.0 + 16.0 / 256.0,
            Self::Q8_0 => 8.0 + 16.0 / 32.0,
            Self::Affine4 => 4.0 + 32.0 / 64.0,
        }
    }
}

/// What a row computes. Operations are in f32 unless they say otherwise.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "work", rename_all = "snake_case")]
pub enum Work {
    /// `y = x·Wᵀ + s·(x·A)·B` with a square W; backward gives dx, dA and dB.
    LoraLinear {
        /// Rows of x.
        tokens: usize,
        /// W is `(hidden, hidden)`.
        hidden: usize,
        /// A is `(hidden, rank)`, B `(rank, hidden)`.
        rank: usize,
        /// Forward or backward.
        pass: Pass,
    },
    /// A quantised matrix as one of bf16.
    Dequantize {
        /// Rows.
        outer: usize,
        /// Columns.
        inner: usize,
        /// How it is quantised.
        packing: Packing,
    },
    /// `y = x·Wᵀ` in bf16 with a quantised W.
    QuantizedLinear {
        /// Rows of x.
        tokens: usize,
        /// Rows of W.
        outer: usize,
        /// Columns of W.
        inner: usize,
        /// How it is quantised.
        packing: Packing,
    },
    /// Softmax over the last dimension.
    Softmax {
        /// Of x.
        shape: Vec<usize>,
        /// Forward or backward.
        pass: Pass,
        /// Of x, the result and their gradients.
        #[serde(default)]
        dtype: Precision,
    },
    /// Layer norm over the last dimension; backward gives dx and the gradients of weight and bias.
    LayerNorm {
        /// Of x.
        shape: Vec<usize>,
        /// Forward or backward.
        pass: Pass,
        /// Of x, the result and their gradients.
        #[serde(default)]
        dtype: Precision,
    },
    /// RMS norm over the last dimension; backward gives dx and the weight's gradient.
    RmsNorm {
        /// Of x.
        shape: Vec<usize>,
        /// Forward or backward.
        pass: Pass,
        /// Of x, the result and their gradients.
        #[serde(default)]
        dtype: Precision,
    },
    /// Causal attention over q `(batch, seq, heads, head_dim)` and k and v `(batch, seq, kv_heads,
    /// head_dim)`; backward gives dq, dk and dv.
    Attention {
        /// Sequences.
        batch: usize,
        /// Tokens of each.
        seq: usize,
        /// Of the queries.
        heads: usize,
        /// Of keys and values.
        kv_heads: usize,
        /// Width of a head.
        head_dim: usize,
        /// Forward or backward.
        pass: Pass,
        /// Of all tensors.
        dtype: Precision,
    },
    /// The norm of the gradient, clipping and one step of AdamW on flat parameters.
    AdamW {
        /// How many there are.
        parameters: usize,
    },
    /// Forward, backward, clipping and AdamW with LoRA on every linear layer of the decoder.
    Train {
        /// As [`shapes::config`] reads it.
        shape: String,
        /// Sequences in the batch.
        batch: usize,
        /// Tokens in a sequence.
        seq: usize,
        /// Of every adapter.
        rank: usize,
        /// Of weights and activations; the adapter is f32.
        dtype: Precision,
        /// Activations are computed again instead of stored.
        checkpointing: bool,
        /// The adapters are DoRA's.
        dora: bool,
        /// What only the backward pass reads waits in the memory of the host.
        #[serde(default)]
        offload: bool,
        /// What the weights are held in, if it isn't `dtype`.
        #[serde(default)]
        quantization: Option<Quantization>,
    },
    /// A prompt to the logits after it.
    Prefill {
        /// As [`shapes::config`] reads it.
        shape: String,
        /// Tokens of the prompt.
        tokens: usize,
        /// Of weights and activations.
        dtype: Precision,
        /// What the weights are held in, if it isn't `dtype`.
        #[serde(default)]
        quantization: Option<Quantization>,
    },
    /// Greedy tokens one after the other, each from a forward pass of one token.
    Decode {
        /// As [`shapes::config`] reads it.
        shape: String,
        /// Tokens in the cache before the first.
        prompt: usize,
        /// Tokens decoded in a call.
        tokens: usize,
        /// Of weights and activations.
        dtype: Precision,
        /// What the weights are held in, if it isn't `dtype`.
        #[serde(default)]
        quantization: Option<Quantization>,
    },
    /// Greedy texts of many requests at once, from their prompts to their last tokens, which share nothing.
    Serve {
        /// As [`shapes::config`] reads it.
        shape: String,
        /// How many there are.
        requests: usize,
        /// Tokens of each prompt.
        prompt: usize,
        /// Tokens of each text.
        tokens: usize,
        /// Whether these are the means of lengths with long tails, see [`lengths`].
        #[serde(default)]
        mixed: bool,
        /// Adapters that the requests have in turn, of the ranks of [`rank_of`].
        #[serde(default)]
        adapters: usize,
        /// The layers that these adapters are on, of [`LINEAR_LAYERS`]; none stands for all.
        #[serde(default)]
        adapted: Vec<String>,
        /// Whether keys and values are kept in 8 bits.
        #[serde(default)]
        rounded_cache: bool,
        /// Whether a text has the same bits in any company.
        #[serde(default)]
        batch_invariant: bool,
        /// How many are read and written at once, at most; without it all, or where lengths are mixed as many as an
        /// engine usually has.
        #[serde(default)]
        max_sequences: Option<usize>,
        /// Tokens that the model reads at once, at most; without it as many as an engine usually has.
        #[serde(default)]
        max_batch_tokens: Option<usize>,
        /// Whether those of the most tokens are begun first.
        #[serde(default)]
        longest_first: bool,
        /// Of weights and activations.
        dtype: Precision,
        /// What the weights are held in, if it isn't `dtype`.
        #[serde(default)]
        quantization: Option<Quantization>,
    },
    /// The first token of a request that comes while others are written.
    FirstToken {
        /// As [`shapes::config`] reads it.
        shape: String,
        /// Texts that are written meanwhile.
        busy: usize,
        /// Tokens of its prompt.
        prompt: usize,
        /// Whether the same prompt was read before.
        seen: bool,
        /// Of weights and activations.
        dtype: Precision,
        /// What the weights are held in, if it isn't `dtype`.
        #[serde(default)]
        quantization: Option<Quantization>,
    },
}

/// How many of some requests are read and written at once: as many as there are, if not so many that each has more memory
/// than it needs.
pub fn requests_at_once(requests: usize, mixed: bool, max_sequences: Option<usize>) -> usize {
    let usual = if mixed { EngineOptions::default().max_sequences } else { requests };
    max_sequences.unwrap_or(usual).min(requests)
}

/// The tokens of the prompt and the text of each of some requests. Mixed ones are log-normal with these means and a
/// deviation of 1 of their logarithms, 5 times the mean at most: about as those of conversations that people have
/// shared (ShareGPT). They follow from a seed of their own.
pub fn lengths(requests: usize, means: [usize; 2], mixed: bool) -> Vec<[usize; 2]> {
    const SEED: u64 = 1;
    if !mixed {
        return vec![means; requests];
    }
    let mut random = SplitMix64::new(SEED);
    let mut length = |mean: usize| {
        let drawn = mean as f64 * (random.normal() - 0.5).exp();
        (drawn.round() as usize).clamp(1, 5 * mean)
    };
    (0..requests).map(|_| means.map(&mut length)).collect()
}

/// The rank of the adapter of this index in a row of many requests: 8, 16, 32 and 64 in turn.
pub fn rank_of(adapter: usize) -> usize {
    8 << (adapter % 4)
}

/// A named piece of work.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Such as `lora-1x512-r8`.
    pub name: String,
    /// What it computes.
    #[serde(flatten)]
    pub work: Work,
    /// The GGUF file that the model is read from, as [`ModelFormat`](metal_candle::model::ModelFormat) names it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
}

/// An input of an operation: uniform numbers around `offset`, at most `scale` away.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct InputSpec {
    /// As the operation's formula names it.
    pub name: &'static str,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Half the width of the distribution.
    pub scale: f64,
    /// Its mean.
    pub offset: f64,
}

/// What a call costs at least.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Cost {
    /// Bytes that have to be read or written once.
    pub bytes: f64,
    /// Multiplications and additions of f32, or of the model's dtype.
    pub operations: f64,
}

impl Row {
    fn new(name: String, work: Work) -> Self {
        Self { name, work, file: None }
    }

    /// A row that unpacks a quantised matrix.
    pub fn dequantize((outer, inner): (usize, usize), packing: Packing) -> Self {
        let name = format!("dequantize-{}-{outer}x{inner}", packing.name());
        Self::new(name, Work::Dequantize { outer, inner, packing })
    }

    /// A row of a linear layer with a quantised matrix.
    pub fn quantized_linear(
        tokens: usize,
        (outer, inner): (usize, usize),
        packing: Packing,
    ) -> Self {
        let name = format!("linear-{}-{tokens}x{outer}x{inner}", packing.name());
        Self::new(name, Work::QuantizedLinear { tokens, outer, inner, packing })
    }

    /// A row of a LoRA linear layer.
    pub fn lora(tokens: usize, hidden: usize, rank: usize, pass: Pass) -> Self {
        let name = format!("lora-{tokens}x{hidden}-r{rank}{}", suffix(pass));
        Self::new(name, Work::LoraLinear { tokens, hidden, rank, pass })
    }

    /// A row of a softmax.
    pub fn softmax(shape: &[usize], pass: Pass, dtype: Precision) -> Self {
        let name = format!("softmax-{}{}{}", joined(shape), in_dtype(dtype), suffix(pass));
        Self::new(name, Work::Softmax { shape: shape.to_vec(), pass, dtype })
    }

    /// A row of a layer norm.
    pub fn layer_norm(shape: &[usize], pass: Pass, dtype: Precision) -> Self {
        let name = format!("layer-norm-{}{}{}", joined(shape), in_dtype(dtype), suffix(pass));
        Self::new(name, Work::LayerNorm { shape: shape.to_vec(), pass, dtype })
    }

    /// A row of an RMS norm.
    pub fn rms_norm(shape: &[usize], pass: Pass, dtype: Precision) -> Self {
        let name = format!("rms-norm-{}{}{}", joined(shape), in_dtype(dtype), suffix(pass));
        Self::new(name, Work::RmsNorm { shape: shape.to_vec(), pass, dtype })
    }

    /// A row of causal attention, with as many heads of keys and values as of queries.
    pub fn attention(seq: usize, heads: usize, head_dim: usize, pass: Pass) -> Self {
        let name = format!("attention-{seq}x{heads}x{head_dim}-bf16{}", suffix(pass));
        let (batch, kv_heads, dtype) = (1, heads, Precision::Bf16);
        Self::new(name, Work::Attention { batch, seq, heads, kv_heads, head_dim, pass, dtype })
    }

    /// A row of the optimiser.
    pub fn adamw(parameters: usize) -> Self {
        Self::new(format!("adamw-{parameters}"), Work::AdamW { parameters })
    }

    /// A row of a training step.
    pub fn train(
        shape: &str,
        (batch, seq): (usize, usize),
        rank: usize,
        dtype: Precision,
        checkpointing: bool,
    ) -> Self {
        let suffix = if checkpointing { "-checkpointing" } else { "" };
        let of = shapes::label(shape);
        let name = format!("train-{of}-{batch}x{seq}-r{rank}-{}{suffix}", dtype.name());
        let shape = shape.to_string();
        let (dora, offload, quantization) = (false, false, None);
        let work = Work::Train {
            shape,
            batch,
            seq,
            rank,
            dtype,
            checkpointing,
            dora,
            offload,
            quantization,
        };
        Self::new(name, work)
    }

    /// The same row of a training step whose activations wait in the memory of the host.
    #[must_use]
    pub fn with_offload(mut self) -> Self {
        if let Work::Train { offload, .. } = &mut self.work {
            *offload = true;
            self.name += "-offload";
        }
        self
    }

    /// The same row of a training step with DoRA's adapters.
    #[must_use]
    pub fn with_dora(mut self) -> Self {
        if let Work::Train { rank, dora, .. } = &mut self.work {
            *dora = true;
            self.name = self.name.replace(&format!("-r{rank}-"), &format!("-r{rank}-dora-"));
        }
        self
    }

    /// A row of a prefill.
    pub fn prefill(shape: &str, tokens: usize, dtype: Precision) -> Self {
        let name = format!("prefill-{}-{tokens}-{}", shapes::label(shape), dtype.name());
        Self::new(
            name,
            Work::Prefill { shape: shape.to_string(), tokens, dtype, quantization: None },
        )
    }

    /// The same row of a model with its weights in fewer bits.
    #[must_use]
    pub fn with_quantization(mut self, format: Option<Quantization>) -> Self {
        if let (
            Work::Train { quantization, .. }
            | Work::Prefill { quantization, .. }
            | Work::Decode { quantization, .. }
            | Work::Serve { quantization, .. }
            | Work::FirstToken { quantization, .. },
            Some(format),
        ) = (&mut self.work, format)
        {
            *quantization = Some(format);
            self.name = format!("{}-{format}", self.name);
        }
        self
    }

    /// The same row of a model in a GGUF file.
    #[must_use]
    pub fn with_file(mut self, format: &str) -> Self {
        self.name = format!("{}-{format}", self.name);
        self.file = Some(format.to_string());
        self
    }

    /// A row of a decode.
    pub fn decode(shape: &str, prompt: usize, tokens: usize, dtype: Precision) -> Self {
        let name = format!("decode-{}-{tokens}-{}", shapes::label(shape), dtype.name());
        Self::new(
            name,
            Work::Decode { shape: shape.to_string(), prompt, tokens, dtype, quantization: None },
        )
    }

    /// A row of many requests.
    pub fn serve(
        shape: &str,
        requests: usize,
        [prompt, tokens]: [usize; 2],
        dtype: Precision,
    ) -> Self {
        let of = shapes::label(shape);
        let name = format!("serve-{of}-{requests}x{prompt}+{tokens}-{}", dtype.name());
        let work = Work::Serve {
            shape: shape.to_string(),
            requests,
            prompt,
            tokens,
            mixed: false,
            adapters: 0,
            adapted: Vec::new(),
            rounded_cache: false,
            batch_invariant: false,
            max_sequences: None,
            max_batch_tokens: None,
            longest_first: false,
            dtype,
            quantization: None,
        };
        Self::new(name, work)
    }

    /// The same row of requests whose lengths differ.
    #[must_use]
    pub fn with_mixed_lengths(mut self) -> Self {
        if let Work::Serve { mixed, .. } = &mut self.work {
            *mixed = true;
            self.name = format!("{}-mixed", self.name);
        }
        self
    }

    /// The same row with keys and values in 8 bits.
    #[must_use]
    pub fn with_rounded_cache(mut self) -> Self {
        if let Work::Serve { rounded_cache, .. } = &mut self.work {
            *rounded_cache = true;
            self.name = format!("{}-cache8", self.name);
        }
        self
    }

    /// The same row with the same bits for each text in any company.
    #[must_use]
    pub fn with_batch_invariance(mut self) -> Self {
        if let Work::Serve { batch_invariant, .. } = &mut self.work {
            *batch_invariant = true;
            self.name = format!("{}-invariant", self.name);
        }
        self
    }

    /// The same row of which so many are read and written at once, at most.
    #[must_use]
    pub fn with_max_sequences(mut self, most: usize) -> Self {
        if let Work::Serve { max_sequences, .. } = &mut self.work {
            *max_sequences = Some(most);
            self.name = format!("{}-{most}-at-once", self.name);
        }
        self
    }

    /// The same row in which the model reads so many tokens at once, at most.
    #[must_use]
    pub fn with_max_batch_tokens(mut self, most: usize) -> Self {
        if let Work::Serve { max_batch_tokens, .. } = &mut self.work {
            *max_batch_tokens = Some(most);
            self.name = format!("{}-{most}-tokens", self.name);
        }
        self
    }

    /// The same row whose requests of the most tokens are begun first.
    #[must_use]
    pub fn with_longest_first(mut self) -> Self {
        if let Work::Serve { longest_first, .. } = &mut self.work {
            *longest_first = true;
            self.name = format!("{}-longest-first", self.name);
        }
        self
    }

    /// A row of the wait for a first token.
    pub fn first_token(
        shape: &str,
        busy: usize,
        prompt: usize,
        seen: bool,
        dtype: Precision,
    ) -> Self {
        let known = if seen { "-seen" } else { "" };
        let of = shapes::label(shape);
        let name = format!("first-token-{of}-{prompt}{known}-beside-{busy}-{}", dtype.name());
        let (shape, quantization) = (shape.to_string(), None);
        Self::new(name, Work::FirstToken { shape, busy, prompt, seen, dtype, quantization })
    }

    /// The same row of requests that have so many adapters in turn, on these of [`LINEAR_LAYERS`] or, if none is
    /// named, on all.
    #[must_use]
    pub fn with_adapters(mut self, count: usize, layers: &[String]) -> Self {
        if let (Work::Serve { adapters, adapted, .. }, true) = (&mut self.work, count > 0) {
            *adapters = count;
            *adapted = layers.to_vec();
            self.name = format!("{}-{count}-adapters", self.name);
            if !layers.is_empty() {
                self.name = format!("{}-of-{}", self.name, layers.join("-"));
            }
        }
        self
    }
}

fn suffix(pass: Pass) -> &'static str {
    match pass {
        Pass::Forward => "",
        Pass::Backward => "-backward",
    }
}

fn in_dtype(dtype: Precision) -> &'static str {
    match dtype {
        Precision::F32 => "",
        Precision::Bf16 => "-bf16",
    }
}

fn joined(shape: &[usize]) -> String {
    shape.iter().map(usize::to_string).collect::<Vec<_>>().join("x")
}

/// The shape that softmax and the norms are timed with.
const NORM_SHAPE: [usize; 3] = [4, 16, 1024];

/// The rows of single operations.
pub fn operations() -> Vec<Row> {
    let mut rows = Vec::new();
    for pass in [Pass::Forward, Pass::Backward] {
        rows.extend([512, 1024, 2048].map(|hidden| Row::lora(1, hidden, 8, pass)));
        rows.extend([4, 16, 32, 64].map(|rank| Row::lora(1, 1024, rank, pass)));
        rows.push(Row::softmax(&NORM_SHAPE, pass, Precision::F32));
        rows.push(Row::layer_norm(&NORM_SHAPE, pass, Precision::F32));
        rows.push(Row::rms_norm(&NORM_SHAPE, pass, Precision::F32));
        rows.push(Row::lora(128, 2048, 16, pass));
    }
    rows.push(Row::adamw(10_000_000));
    rows
}

/// The rows of single operations that are worth a GPU.
pub fn gpu_operations() -> Vec<Row> {
    const SHAPE: [usize; 2] = [8192, 4096];
    let mut rows = operations();
    for pass in [Pass::Forward, Pass::Backward] {
        rows.push(Row::softmax(&SHAPE, pass, Precision::Bf16));
        rows.push(Row::layer_norm(&SHAPE, pass, Precision::Bf16));
        rows.push(Row::rms_norm(&SHAPE, pass, Precision::Bf16));
        rows.push(Row::attention(2048, 16, 128, pass));
        rows.push(Row::attention(16384, 16, 128, pass));
    }
    for shape in [(14336, 4096), (4096, 14336), (4096, 4096)] {
        for packing in Packing::ALL {
            rows.push(Row::dequantize(shape, packing));
            rows.extend([1, 8].map(|tokens| Row::quantized_linear(tokens, shape, packing)));
        }
    }
    rows
}

/// The rows on a model of that shape that `benches/peers` compares.
pub fn models(shape: &str) -> Vec<Row> {
    use Precision::{Bf16, F32};
    // Models for a GPU, in what fits one.
    let large = match shape {
        "llama-3-8b" => vec![
            Row::train(shape, (4, 2048), 16, Bf16, false),
            Row::train(shape, (4, 2048), 16, Bf16, false)
                .with_quantization(Some(Quantization::FP8_COMPUTE)),
            Row::train(shape, (4, 2048), 16, Bf16, false).with_dora(),
            Row::train(shape, (4, 2048), 16, Bf16, true),
            Row::train(shape, (1, 32768), 16, Bf16, true),
        ],
        "llama-3.2-1b" => vec![Row::train(shape, (8, 1024), 16, Bf16, false)],
        _ => Vec::new(),
    };
    let files = ["gguf-q8_0", "gguf-q4_0", "gguf-q4_k_m"].into_iter().flat_map(|format| {
        [Row::prefill(shape, 512, Bf16), Row::decode(shape, 16, 64, Bf16)]
            .map(|row| row.with_file(format))
    });
    if !large.is_empty() {
        let generation = [
            Row::prefill(shape, 2048, Bf16),
            Row::decode(shape, 16, 64, Bf16),
            Row::serve(shape, 64, [256, 128], Bf16),
            Row::serve(shape, 256, [256, 128], Bf16),
        ];
        return large.into_iter().chain(generation).chain(files).collect();
    }
    let mut rows = vec![
        Row::train(shape, (1, 512), 16, Bf16, false),
        Row::train(shape, (1, 512), 16, Bf16, false).with_dora(),
        Row::train(shape, (1, 512), 16, F32, false),
        Row::train(shape, (4, 512), 16, Bf16, true),
        Row::train(shape, (1, 2048), 16, Bf16, true),
    ];
    for dtype in [Bf16, F32] {
        rows.push(Row::prefill(shape, 512, dtype));
        rows.push(Row::decode(shape, 16, 64, dtype));
        rows.push(Row::serve(shape, 8, [16, 32], dtype));
    }
    rows.push(Row::serve(shape, 32, [16, 32], Bf16));
    let nf4 = "nf4".parse().ok();
    rows.push(Row::train(shape, (1, 512), 16, Bf16, false).with_quantization(nf4));
    rows.extend(files);
    rows
}

impl Work {
    /// The inputs of an operation; empty for work on a model.
    pub fn inputs(&self) -> Vec<InputSpec> {
        let input = |name, shape: &[usize], scale: f64| InputSpec {
            name,
            shape: shape.to_vec(),
            scale,
            offset: 0.0,
        };
        let weight =
            |size| InputSpec { name: "weight", shape: vec![size], scale: 0.5, offset: 1.0 };
        match self {
            &Self::LoraLinear { tokens, hidden, rank, pass } => {
                let scale = 1.0 / (hidden as f64).sqrt();
                let mut inputs = vec![
                    input("x", &[tokens, hidden], 1.0),
                    input("weight", &[hidden, hidden], scale),
                    input("a", &[hidden, rank], scale),
                    input("b", &[rank, hidden], 1.0 / (rank as f64).sqrt()),
                ];
                if pass == Pass::Backward {
                    inputs.push(input("dy", &[tokens, hidden], 1.0));
                }
                inputs
            }
            // Some rows of the matrix, which are all that it has, again and again.
            &Self::Dequantize { outer, inner, .. } => {
                vec![input("weight", &[outer.min(QUANTIZED_ROWS), inner], 0.02)]
            }
            &Self::QuantizedLinear { tokens, outer, inner, .. } => vec![
                input("x", &[tokens, inner], 1.0),
                input("weight", &[outer.min(QUANTIZED_ROWS), inner], 0.02),
            ],
            Self::Softmax { shape, pass, .. } => {
                let mut inputs = vec![input("x", shape, 4.0)];
                if *pass == Pass::Backward {
                    inputs.push(input("dy", shape, 1.0));
                }
                inputs
            }
            Self::LayerNorm { shape, pass, .. } => {
                let size = last(shape);
                let mut inputs =
                    vec![input("x", shape, 2.0), weight(size), input("bias", &[size], 0.5)];
                if *pass == Pass::Backward {
                    inputs.push(input("dy", shape, 1.0));
                }
                inputs
            }
            Self::RmsNorm { shape, pass, .. } => {
                let mut inputs = vec![input("x", shape, 2.0), weight(last(shape))];
                if *pass == Pass::Backward {
                    inputs.push(input("dy", shape, 1.0));
                }
                inputs
            }
            &Self::Attention { batch, seq, heads, kv_heads, head_dim, pass, .. } => {
                let keys = [batch, seq, kv_heads, head_dim];
                let queries = [batch, seq, heads, head_dim];
                let mut inputs =
                    vec![input("q", &queries, 2.0), input("k", &keys, 2.0), input("v", &keys, 2.0)];
                if pass == Pass::Backward {
                    inputs.push(input("dy", &queries, 1.0));
                }
                inputs
            }
            &Self::AdamW { parameters } => {
                vec![
                    input("parameters", &[parameters], 1e-3),
                    input("gradients", &[parameters], 1e-2),
                ]
            }
            Self::Train { .. }
            | Self::Prefill { .. }
            | Self::Decode { .. }
            | Self::Serve { .. }
            | Self::FirstToken { .. } => Vec::new(),
        }
    }

    /// The names of what a call returns.
    pub fn outputs(&self) -> &'static [&'static str] {
        match self {
            Self::Dequantize { .. } => &["weight"],
            Self::QuantizedLinear { .. }
            | Self::LoraLinear { pass: Pass::Forward, .. }
            | Self::Softmax { pass: Pass::Forward, .. }
            | Self::LayerNorm { pass: Pass::Forward, .. }
            | Self::RmsNorm { pass: Pass::Forward, .. }
            | Self::Attention { pass: Pass::Forward, .. } => &["y"],
            Self::Attention { pass: Pass::Backward, .. } => &["dq", "dk", "dv"],
            Self::Softmax { pass: Pass::Backward, .. } => &["dx"],
            Self::LayerNorm { pass: Pass::Backward, .. } => &["dx", "dweight", "dbias"],
            Self::LoraLinear { pass: Pass::Backward, .. } => &["dx", "da", "db"],
            Self::RmsNorm { pass: Pass::Backward, .. } => &["dx", "dweight"],
            Self::AdamW { .. } => &["parameters"],
            Self::Train { .. } => &["loss", "gradient_norm"],
            Self::Prefill { .. } => &["logits"],
            Self::Decode { .. } | Self::Serve { .. } | Self::FirstToken { .. } => &["tokens"],
        }
    }

    /// Whether the work is a single operation, which can also be timed in a queue.
    pub fn is_operation(&self) -> bool {
        self.shape().is_none()
    }

    fn is_quantized(&self) -> bool {
        matches!(self, Self::Dequantize { .. } | Self::QuantizedLinear { .. })
    }

    /// Whether a queue of calls makes sense: each is of the same inputs, and leaves results of its
    /// own.
    pub fn can_queue(&self) -> bool {
        self.is_operation() && !matches!(self, Self::AdamW { .. })
    }

    /// Tokens that one call processes, or writes, of work on a model.
    pub fn tokens(&self) -> Option<usize> {
        match self {
            Self::Train { batch, seq, .. } => Some(batch * seq),
            Self::Prefill { tokens, .. } | Self::Decode { tokens, .. } => Some(*tokens),
            &Self::Serve { requests, prompt, tokens, mixed, .. } => {
                let lengths = lengths(requests, [prompt, tokens], mixed);
                Some(lengths.iter().map(|[_, tokens]| tokens).sum())
            }
            _ => None,
        }
    }

    /// The name of the model's shape, of work on a model.
    pub fn shape(&self) -> Option<&str> {
        match self {
            Self::Train { shape, .. }
            | Self::Prefill { shape, .. }
            | Self::Decode { shape, .. }
            | Self::Serve { shape, .. }
            | Self::FirstToken { shape, .. } => Some(shape),
            _ => None,
        }
    }

    /// The dtype that the work computes in.
    pub fn precision(&self) -> Precision {
        match self {
            Self::Softmax { dtype, .. }
            | Self::LayerNorm { dtype, .. }
            | Self::RmsNorm { dtype, .. }
            | Self::Attention { dtype, .. }
            | Self::Train { dtype, .. }
            | Self::Prefill { dtype, .. }
            | Self::Decode { dtype, .. }
            | Self::Serve { dtype, .. }
            | Self::FirstToken { dtype, .. } => *dtype,
            Self::Dequantize { .. } | Self::QuantizedLinear { .. } => Precision::Bf16,
            _ => Precision::F32,
        }
    }

    /// What the weights of a model are brought into while it is loaded.
    pub fn quantization(&self) -> Option<Quantization> {
        match self {
            Self::Train { quantization, .. }
            | Self::Prefill { quantization, .. }
            | Self::Decode { quantization, .. }
            | Self::Serve { quantization, .. }
            | Self::FirstToken { quantization, .. } => *quantization,
            _ => None,
        }
    }

    /// Whether products are with weights in fewer bits.
    pub fn has_packed_weights(&self) -> bool {
        matches!(self, Self::QuantizedLinear { .. }) || self.quantization().is_some()
    }

    /// The bytes of a call's results.
    pub fn result_bytes(&self) -> usize {
        const F32: usize = size_of::<f32>();
        const BF16: usize = 2;
        match self {
            Self::Dequantize { outer, inner, .. } => BF16 * outer * inner,
            Self::QuantizedLinear { tokens, outer, .. } => BF16 * tokens * outer,
            Self::LoraLinear { tokens, hidden, pass: Pass::Forward, .. } => F32 * tokens * hidden,
            Self::LoraLinear { tokens, hidden, rank, .. } => F32 * hidden * (tokens + 2 * rank),
            Self::Softmax { shape, dtype, .. }
            | Self::LayerNorm { shape, dtype, .. }
            | Self::RmsNorm { shape, dtype, .. } => {
                dtype.dtype().size_in_bytes() * shape.iter().product::<usize>()
            }
            Self::Attention { batch, seq, heads, kv_heads, head_dim, pass, dtype } => {
                let width = match pass {
                    Pass::Forward => *heads,
                    Pass::Backward => heads + 2 * kv_heads,
                };
                dtype.dtype().size_in_bytes() * batch * seq * head_dim * width
            }
            _ => 0,
        }
    }

    /// The bytes that pass between two uses of the same byte: whether they fit a cache decides how
    /// fast they can be read.
    ///
    /// # Errors
    /// For a shape that has no such name.
    pub fn working_set(&self) -> Result<f64> {
        // A decoded token reads every weight once.
        let turns = match self {
            Self::Decode { tokens, .. } | Self::Serve { tokens, .. } => *tokens as f64,
            _ => 1.0,
        };
        // A quantised matrix has copies in turn, see `operations`.
        let copies = if self.is_quantized() { QUANTIZED_COPIES as f64 } else { 1.0 };
        Ok(self.cost()?.bytes * copies / turns.max(1.0))
    }

    /// What a call costs at least, whoever computes it: every input read once, every result written
    /// once, and the operations of the formula. Recomputed activations don't count.
    ///
    /// # Errors
    /// For a shape that has no such name.
    pub fn cost(&self) -> Result<Cost> {
        const F32: f64 = 4.0;
        const BF16: f64 = 2.0;
        Ok(match self {
            &Self::Dequantize { outer, inner, packing } => {
                let n = (outer * inner) as f64;
                // A product and a sum.
                Cost { bytes: n * (packing.bits() / 8.0 + BF16), operations: 2.0 * n }
            }
            &Self::QuantizedLinear { tokens, outer, inner, packing } => {
                let (n, matrix) = (tokens as f64, (outer * inner) as f64);
                let activations = BF16 * n * (outer + inner) as f64;
                Cost {
                    bytes: matrix * packing.bits() / 8.0 + activations,
                    operations: 2.0 * n * matrix,
                }
            }
            &Self::LoraLinear { tokens, hidden, rank, pass } => {
                let (n, h, r) = (tokens as f64, hidden as f64, rank as f64);
                let matrix = h * h;
                match pass {
                    Pass::Forward => Cost {
                        bytes: F32 * (matrix + 2.0 * h * r + 2.0 * n * h),
                        operations: 2.0 * n * (matrix + 2.0 * h * r),
                    },
                    // dx has three products with the adapter's matrices, dA and dB one each.
                    Pass::Backward => Cost {
                        bytes: F32 * (matrix + 4.0 * h * r + 3.0 * n * h),
                        operations: 2.0 * n * (matrix + 4.0 * h * r),
                    },
                }
            }
            &Self::Attention { batch, seq, heads, kv_heads, head_dim, pass, dtype } => {
                let (tokens, width) = ((batch * seq) as f64, head_dim as f64);
                let (queries, keys) =
                    (tokens * heads as f64 * width, tokens * kv_heads as f64 * width);
                // Two products forward and five backward, half of each square.
                let products = match pass {
                    Pass::Forward => 2.0,
                    Pass::Backward => 5.0,
                };
                let arrays = match pass {
                    Pass::Forward => 2.0 * queries + 2.0 * keys,
                    Pass::Backward => 4.0 * queries + 4.0 * keys,
                };
                Cost {
                    bytes: bytes_of(dtype) * arrays,
                    operations: products * queries * seq as f64,
                }
            }
            Self::Softmax { shape, pass, dtype }
            | Self::LayerNorm { shape, pass, dtype }
            | Self::RmsNorm { shape, pass, dtype } => {
                let n = shape.iter().product::<usize>() as f64;
                // Around this many an element, the exponential not counted; memory decides.
                let (arrays, operations) = match pass {
                    Pass::Forward => (2.0, 4.0),
                    Pass::Backward => (3.0, 10.0),
                };
                Cost { bytes: bytes_of(*dtype) * arrays * n, operations: operations * n }
            }
            &Self::AdamW { parameters } => {
                let n = parameters as f64;
                // The norm reads every gradient before the step can read it again.
                Cost { bytes: F32 * 8.0 * n, operations: 16.0 * n }
            }
            Self::Train { shape, batch, seq, rank, dtype, quantization, .. } => {
                let model = Sizes::of(shape)?;
                let tokens = (batch * seq) as f64;
                // Forward and the gradient of the input through every frozen matrix; forward and
                // three gradients' worth through A and B.
                let matrices = 4.0 * (model.linears + model.head) * tokens;
                let adapters = 6.0 * model.width_of_adapters(&[]) * *rank as f64 * tokens;
                let attention = 3.0 * model.attention(*seq as f64) * *batch as f64;
                Cost {
                    bytes: 2.0 * model.bytes(*dtype, *quantization),
                    operations: matrices + adapters + attention,
                }
            }
            Self::Prefill { shape, tokens, dtype, quantization } => {
                let model = Sizes::of(shape)?;
                let n = *tokens as f64;
                Cost {
                    bytes: model.bytes(*dtype, *quantization),
                    operations: 2.0 * (model.linears * n + model.head) + model.attention(n),
                }
            }
            Self::Decode { shape, tokens, dtype, quantization, .. } => {
                let model = Sizes::of(shape)?;
                let n = *tokens as f64;
                let weights = model.linears + model.head;
                Cost {
                    bytes: n * model.bytes(*dtype, *quantization),
                    operations: 2.0 * n * weights,
                }
            }
            Self::Serve {
                shape,
                requests,
                prompt,
                tokens,
                mixed,
                adapters,
                adapted,
                dtype,
                quantization,
                ..
            } => {
                let model = Sizes::of(shape)?;
                let width = model.width_of_adapters(adapted);
                let lengths = lengths(*requests, [*prompt, *tokens], *mixed);
                let rank = |request| if *adapters > 0 { rank_of(request % adapters) } else { 0 };
                let of_request = |(request, [prompt, tokens]): (usize, &[usize; 2])| {
                    let (all, tokens) = ((prompt + tokens - 1) as f64, *tokens as f64);
                    let factors = width * rank(request) as f64;
                    2.0 * ((model.linears + factors) * all + model.head * tokens)
                        + model.attention(all)
                };
                let read: usize = (0..(*adapters).min(*requests)).map(rank_of).sum();
                let factors = bytes_of(*dtype) * width * read as f64;
                // A pass for each token of the longest text, the first of which reads the prompts.
                let passes = lengths.iter().map(|[_, tokens]| *tokens).max().unwrap_or(0) as f64;
                Cost {
                    bytes: passes * (model.bytes(*dtype, *quantization) + factors),
                    operations: lengths.iter().enumerate().map(of_request).sum(),
                }
            }
            Self::FirstToken { shape, busy, prompt, seen, dtype, quantization } => {
                let model = Sizes::of(shape)?;
                let read = if *seen { 1.0 } else { *prompt as f64 };
                let rows = *busy as f64;
                Cost {
                    bytes: model.bytes(*dtype, *quantization),
                    operations: 2.0 * (model.linears * (read + rows) + model.head * (1.0 + rows))
                        + if *seen { 0.0 } else { model.attention(read) },
                }
            }
        })
    }
}

fn last(shape: &[usize]) -> usize {
    shape.last().copied().unwrap_or(1)
}

fn bytes_of(dtype: Precision) -> f64 {
    dtype.dtype().size_in_bytes() as f64
}

/// The linear layers of a decoder's layer by name.
pub const LINEAR_LAYERS: [&str; 7] =
    ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];

/// What a model's cost follows from.
struct Sizes {
    /// Weights in the decoder's linear layers, and those of experts among them.
    linears: f64,
    experts: f64,
    /// Weights of the head.
    head: f64,
    /// Inputs and outputs of each of [`LINEAR_LAYERS`], added up, of all layers.
    adapter_widths: [f64; LINEAR_LAYERS.len()],
    /// The width of all query heads.
    query_width: f64,
    /// How many tokens a layer sees at most, of each.
    windows: Vec<Option<usize>>,
}

impl Sizes {
    /// Of all matrices that a token passes through.
    fn bytes(&self, dtype: Precision, quantization: Option<Quantization>) -> f64 {
        let quantized = quantization.map_or([None; 3], |it| it.bits_per_weight());
        let [linears, experts, head] = quantized.map(|it| it.unwrap_or(8.0 * bytes_of(dtype)));
        let others = self.linears - self.experts;
        (others * linears + self.experts * experts + self.head * head) / 8.0
    }

    /// What an adapter of rank 1 has on these of [`LINEAR_LAYERS`], or without a name on all.
    fn width_of_adapters(&self, names: &[String]) -> f64 {
        let is_meant = |name| names.is_empty() || names.iter().any(|it| it == name);
        let widths = LINEAR_LAYERS.into_iter().zip(self.adapter_widths);
        widths.filter(|(name, _)| is_meant(*name)).map(|(_, width)| width).sum()
    }

    fn of(shape: &str) -> Result<Self> {
        let config = shapes::config(shape)?;
        let layers = config.layers.len() as f64;
        let hidden = config.hidden_size as f64;
        let queries = (config.heads * config.head_dim) as f64;
        let keys = (config.kv_heads * config.head_dim) as f64;
        // Of experts, those that read a token.
        let inner = config.mlp_columns() as f64;
        let pairs = [
            (hidden, queries),
            (hidden, keys),
            (hidden, keys),
            (queries, hidden),
            (hidden, inner),
            (hidden, inner),
            (inner, hidden),
        ];
        Ok(Self {
            linears: layers * pairs.iter().map(|(input, output)| input * output).sum::<f64>(),
            experts: config.experts.map_or(0.0, |_| layers * 3.0 * hidden * inner),
            head: config.vocab_size as f64 * hidden,
            adapter_widths: pairs.map(|(input, output)| layers * (input + output)),
            query_width: queries,
            windows: config.layers.iter().map(|layer| layer.window).collect(),
        })
    }

    /// Operations of the attention of one causal sequence: scores and values, half of each square or a band of it.
    fn attention(&self, seq: f64) -> f64 {
        let pairs = |window: &Option<usize>| {
            let unseen = window.map_or(0.0, |window| (seq - window as f64).max(0.0));
            (seq * seq - unseen * unseen) / 2.0
        };
        4.0 * self.windows.iter().map(pairs).sum::<f64>() * self.query_width
    }
}

/// Tensors by name.
#[derive(Debug, Default)]
pub struct Inputs(pub HashMap<String, Tensor>);

impl Inputs {
    /// Made up from a seed.
    ///
    /// # Errors
    /// When a tensor doesn't fit into memory.
    pub fn random(work: &Work, seed: u64) -> Result<Self> {
        let mut inputs = HashMap::new();
        for (index, spec) in work.inputs().into_iter().enumerate() {
            let mut random = SplitMix64::stream(seed, index as u64);
            let count = spec.shape.iter().product();
            let values: Vec<f32> = (0..count)
                .map(|_| (spec.offset + spec.scale * (2.0 * random.uniform() - 1.0)) as f32)
                .collect();
            let tensor = Tensor::from_vec(values, spec.shape, &Device::Cpu)?;
            inputs.insert(spec.name.to_string(), tensor);
        }
        Ok(Self(inputs))
    }

    /// The same in the dtype of an operation, on `device`.
    ///
    /// # Errors
    /// When the device has no room.
    pub fn of(&self, work: &Work, device: &Device) -> Result<Self> {
        let dtype = work.precision().dtype();
        let moved = self
            .0
            .iter()
            .map(|(name, tensor)| Ok((name.clone(), tensor.to_dtype(dtype)?.to_device(device)?)));
        Ok(Self(moved.collect::<Result<_>>()?))
    }

    /// The tensor of that name.
    ///
    /// # Errors
    /// When there is none.
    pub fn get(&self, name: &str) -> Result<Tensor> {
        self.0.get(name).cloned().ok_or_else(|| {
            Error::option("inputs", format!("have no `{name}`, expected one of that name"))
        })
    }
}

/// Token ids in `0..vocabulary` that follow from a seed.
pub fn random_ids(count: usize, vocabulary: usize, seed: u64) -> Vec<u32> {
    let mut random = SplitMix64::new(seed);
    (0..count).map(|_| random.below(vocabulary as u64) as u32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use metal_candle::model::ModelFormat;
    use std::str::FromStr;

    #[test]
    fn rows_have_names_of_their_own_and_survive_json() {
        let rows: Vec<Row> = gpu_operations().into_iter().chain(models("tiny")).collect();
        let names: std::collections::HashSet<&str> =
            rows.iter().map(|row| row.name.as_str()).collect();
        assert_eq!(names.len(), rows.len());
        assert!(rows.iter().any(|row| row.name.ends_with("-bf16-nf4")));
        for row in rows {
            if let Some(format) = &row.file {
                assert!(ModelFormat::from_str(format).unwrap().is_file(), "{format}");
            }
            let text = serde_json::to_string(&row).unwrap();
            assert_eq!(serde_json::from_str::<Row>(&text).unwrap(), row);
        }
    }

    #[test]
    fn a_training_step_of_512_tokens_is_275_gflop_in_the_frozen_matrices() {
        let row = Row::train("smollm2-135m", (1, 512), 16, Precision::F32, false);
        let operations = row.work.cost().unwrap().operations;
        let sizes = Sizes::of("smollm2-135m").unwrap();
        let matrices = 4.0 * (sizes.linears + sizes.head) * 512.0;
        assert!((matrices / 1e9 - 275.4).abs() < 0.1, "{matrices}");
        assert!(operations > matrices && operations < 1.2 * matrices, "{operations}");
    }

    #[test]
    fn adapters_cost_what_the_layers_that_they_are_on_have() {
        let cost = |count: usize, layers: &[&str]| {
            let layers: Vec<String> = layers.iter().map(|name| name.to_string()).collect();
            let row = Row::serve("llama-3-8b", 4, [8, 4], Precision::Bf16);
            row.with_adapters(count, &layers).work.cost().unwrap().bytes
        };
        let none = cost(0, &[]);
        assert_eq!(cost(4, &LINEAR_LAYERS), cost(4, &[]));
        // A rank of one has 8192 numbers on the queries' and 5120 on the values' projection of each of 32 layers.
        let ranks: usize = (0..4).map(rank_of).sum();
        let expected = 4.0 * 2.0 * 32.0 * (8192 + 5120) as f64 * ranks as f64;
        assert_eq!(cost(4, &["q_proj", "v_proj"]) - none, expected);
    }
}
