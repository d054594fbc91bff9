//! `bench`: what this machine takes for operations, a training step, prefill and decode.

use crate::bounds;
use crate::errors::{SUCCESS, usage};
use crate::models::{
    Runtime, check_host, check_matmul, describe_compute, device, dtype, set_matmul, set_threads,
};
use crate::output::{self, Terminal, bytes};
use crate::settings::{ActivationPlacement, Matmul};
use candle_core::{DType, Device};
use clap::{Args, FromArgMatches, ValueEnum};
use metal_candle::engine::CacheDtype;
use metal_candle::files;
use metal_candle_bench::machine::{Machine, Peaks};
use metal_candle_bench::report::{Measured, measure};
use metal_candle_bench::rows::{
    LINEAR_LAYERS, Precision, Work, gpu_operations, operations, requests_at_once,
};
use metal_candle_bench::timing::{Plan, Summary};
use metal_candle_bench::{Row, chips, shapes};
use serde::Serialize;
use std::path::PathBuf;
use std::time::Duration;

const EXAMPLES: &str = "\
Examples:
  metal-candle bench
  metal-candle bench --only train,decode --shape llama-3.2-1b --dtype bf16 --seq 1024
  metal-candle bench --only train --shape models/Qwen3-8B --dtype bf16 --gradient-checkpointing
  metal-candle bench --only ops --json results.json

Weights are random: what a step costs does not depend on them. A share of peak is the time that \
the bytes and operations of a call need at the bandwidth and arithmetic measured first, over the \
time it took. On Metal, LoRA layers are timed with each choice of --matmul, unless one is given. To compare with MLX, PyTorch and Candle: python3 benches/peers/run.py";

/// Bytes of the largest buffer that the machine's bandwidth is measured on.
const LARGEST_BUFFER: usize = 1 << 30;

/// A part of the benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Single operations, forward and backward
    Ops,
    /// A LoRA training step
    Train,
    /// A prompt to the logits after it
    Prefill,
    /// Greedy tokens, one after the other
    Decode,
    /// Greedy texts of many requests at once
    Serve,
    /// The first token of a request that comes while others are written
    FirstToken,
}

/// What the command is told.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    /// The parts to time, with commas between [default: all]
    #[arg(long, value_enum, value_name = "PART", value_delimiter = ',', help_heading = "Work")]
    only: Vec<Part>,
    /// The model's shape: smollm2-135m, llama-3.2-1b, llama-3-8b, qwen3-30b-a3b, gpt-oss-20b, tiny, or that of a model's folder, config.json or GGUF
    /// file, of which the weights aren't read
    #[arg(long, value_name = "NAME|PATH", default_value = "smollm2-135m", help_heading = "Work")]
    shape: String,
    /// Rows of the training batch
    #[arg(short, long, value_name = "N", default_value_t = 1, help_heading = "Work")]
    batch: usize,
    /// Tokens of a row, and of the prompt of the prefill, also more than such models are made for
    #[arg(long, value_name = "N", default_value_t = 512, help_heading = "Work")]
    seq: usize,
    /// Rank of the adapters, one on every linear layer
    #[arg(long, value_name = "N", default_value_t = 16, help_heading = "Work")]
    rank: usize,
    /// Train DoRA's adapters
    #[arg(long, help_heading = "Work")]
    dora: bool,
    /// Recompute activations in the backward pass instead of storing them
    #[arg(long, visible_alias = "grad-checkpoint", help_heading = "Work")]
    gradient_checkpointing: bool,
    /// Where activations wait for the backward pass, as in `train`
    #[arg(long, value_enum, default_value = "device", help_heading = "Work")]
    activation_placement: ActivationPlacement,
    /// Tokens of the prompt before those that are decoded
    #[arg(long, value_name = "N", default_value_t = 16, help_heading = "Work")]
    prompt: usize,
    /// Requests at once, or beside the one that waits for its first token
    #[arg(long, value_name = "N", default_value_t = 8, help_heading = "Work")]
    requests: usize,
    /// Adapters of ranks 8 to 64, which the requests have in turn
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Work")]
    adapters: usize,
    /// Layers that the requests' adapters are on, separated by commas [default: every linear layer]
    #[arg(long, value_name = "NAMES", value_delimiter = ',', value_parser = LINEAR_LAYERS, requires = "adapters", help_heading = "Work")]
    target_modules: Vec<String>,
    /// Requests that are read and written at once, at most; all, or with --mixed-lengths as many as `serve` has
    #[arg(long, value_name = "N", help_heading = "Work")]
    max_sequences: Option<usize>,
    /// Tokens of requests that the model reads at once, at most, no fewer than requests at once
    #[arg(long, value_name = "N", help_heading = "Work")]
    max_batch_tokens: Option<usize>,
    /// Draw the requests' tokens around --prompt and --tokens, with long tails
    #[arg(long, help_heading = "Work")]
    mixed_lengths: bool,
    /// Begin the requests of the most tokens first, as `generate --prompts` does
    #[arg(long, help_heading = "Work")]
    longest_first: bool,
    /// How the KV cache of requests keeps its numbers, as in `generate`
    #[arg(long, value_name = "DTYPE", default_value_t = CacheDtype::default(), help_heading = "Work")]
    cache_dtype: CacheDtype,
    /// Give requests the same bits in any company, as in `generate`
    #[arg(long, help_heading = "Work")]
    batch_invariant: bool,
    /// Let the request that waits for its first token have a prompt that was read before
    #[arg(long, help_heading = "Work")]
    seen_prompt: bool,
    /// Tokens to decode, of each request
    #[arg(long, value_name = "N", default_value_t = 64, help_heading = "Work")]
    tokens: usize,
    /// Timed calls of an operation
    #[arg(long, value_name = "N", default_value_t = 50, help_heading = "Timing")]
    samples: usize,
    /// Timed calls of work on the model, after one that is not timed
    #[arg(long, value_name = "N", default_value_t = 5, help_heading = "Timing")]
    steps: usize,
    #[command(flatten)]
    runtime: Runtime,
    /// Report as one JSON object on stdout, or into a file
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-", help_heading = "Output")]
    json: Option<PathBuf>,
    /// Instead of timing anything, print what Apple's chips need at least for the first eleven rows, by
    /// the memory bandwidth that Apple publishes
    #[arg(long, conflicts_with = "json", help_heading = "Output")]
    floors: bool,
}

#[derive(Serialize)]
struct Report {
    version: &'static str,
    machine: Machine,
    peaks: Peaks,
    rows: Vec<Measured>,
}

impl Arguments {
    /// That what is asked for has a use in one of the parts that are timed.
    fn check_use(&self) -> anyhow::Result<()> {
        use Part::{Decode, FirstToken, Ops, Prefill, Serve, Train};
        let command = Self::augment_args(clap::Command::new("bench"));
        let usual = Self::from_arg_matches(&command.try_get_matches_from(["bench"])?)?;
        let (runtime, usual_runtime) = (&self.runtime, &usual.runtime);
        let models: &[Part] = &[Train, Prefill, Decode, Serve, FirstToken];
        let flags: [(&str, bool, &[Part]); 24] = [
            ("shape", self.shape != usual.shape, models),
            // An operation is timed in dtypes and formats of its own.
            ("dtype", runtime.dtype != usual_runtime.dtype, models),
            ("quantize", runtime.quantize.is_some(), models),
            ("base-compute", runtime.base_compute != usual_runtime.base_compute, models),
            ("batch", self.batch != usual.batch, &[Train]),
            ("seq", self.seq != usual.seq, &[Train, Prefill]),
            ("rank", self.rank != usual.rank, &[Train]),
            ("dora", self.dora, &[Train]),
            ("gradient-checkpointing", self.gradient_checkpointing, &[Train]),
            (
                "activation-placement",
                self.activation_placement != usual.activation_placement,
                &[Train],
            ),
            ("prompt", self.prompt != usual.prompt, &[Decode, Serve, FirstToken]),
            ("requests", self.requests != usual.requests, &[Serve, FirstToken]),
            ("adapters", self.adapters != usual.adapters, &[Serve]),
            ("target-modules", !self.target_modules.is_empty(), &[Serve]),
            ("max-sequences", self.max_sequences.is_some(), &[Serve]),
            ("max-batch-tokens", self.max_batch_tokens.is_some(), &[Serve]),
            ("mixed-lengths", self.mixed_lengths, &[Serve]),
            ("longest-first", self.longest_first, &[Serve]),
            ("cache-dtype", self.cache_dtype != usual.cache_dtype, &[Serve]),
            ("batch-invariant", self.batch_invariant, &[Serve]),
            ("seen-prompt", self.seen_prompt, &[FirstToken]),
            ("tokens", self.tokens != usual.tokens, &[Decode, Serve]),
            ("samples", self.samples != usual.samples, &[Ops]),
            ("steps", self.steps != usual.steps, models),
        ];
        for (flag, is_given, parts) in flags {
            let is_timed = self.only.is_empty() || parts.iter().any(|it| self.only.contains(it));
            if is_given && !is_timed {
                let values = parts.iter().filter_map(Part::to_possible_value);
                let names: Vec<String> = values.map(|it| it.get_name().to_string()).collect();
                return Err(usage(format!(
                    "--{flag}: is for {}, which --only leaves out; leave the flag out, or add one of them",
                    names.join(", ")
                )));
            }
        }
        Ok(())
    }

    fn check(&self) -> anyhow::Result<()> {
        let at_once = requests_at_once(self.requests, self.mixed_lengths, self.max_sequences);
        for (name, value, allowed) in [
            ("batch", self.batch, bounds::BATCH_SIZE),
            ("seq", self.seq, bounds::TOKENS),
            ("rank", self.rank, bounds::RANK),
            ("prompt", self.prompt, bounds::TOKENS),
            ("requests", self.requests, bounds::BATCH_SIZE),
            ("max-sequences", self.max_sequences.unwrap_or(1), bounds::BATCH_SIZE),
            (
                "max-batch-tokens",
                self.max_batch_tokens.unwrap_or(at_once),
                at_once..=*bounds::TOKENS.end(),
            ),
            ("adapters", self.adapters, 0..=*bounds::BATCH_SIZE.end()),
            ("tokens", self.tokens, bounds::TOKENS),
            ("samples", self.samples, bounds::CALLS),
            ("steps", self.steps, bounds::CALLS),
        ] {
            bounds::check(name, value, &allowed)?;
        }
        self.check_use()?;
        shapes::config(&self.shape).map_err(usage)?;
        let Runtime { matmul, dtype, device, .. } = self.runtime;
        check_matmul(matmul, dtype, device, "--dtype f32")
    }

    fn precision(&self) -> anyhow::Result<Precision> {
        match dtype(self.runtime.dtype) {
            DType::F32 => Ok(Precision::F32),
            DType::BF16 => Ok(Precision::Bf16),
            other => Err(usage(format!("dtype: {other:?} is not timed, expected f32 or bf16"))),
        }
    }

    fn rows(&self, device: &Device) -> anyhow::Result<Vec<Row>> {
        let (shape, dtype) = (self.shape.as_str(), self.precision()?);
        let parts =
            [Part::Ops, Part::Train, Part::Prefill, Part::Decode, Part::Serve, Part::FirstToken];
        let quantization = self.runtime.quantization()?;
        let chosen = parts.iter().filter(|part| self.only.is_empty() || self.only.contains(part));
        Ok(chosen
            .flat_map(|part| match part {
                Part::Ops if device.is_cpu() => operations(),
                Part::Ops => gpu_operations(),
                Part::Train => {
                    let size = (self.batch, self.seq);
                    let checkpointing = self.gradient_checkpointing;
                    let row = Row::train(shape, size, self.rank, dtype, checkpointing);
                    let row = if self.dora { row.with_dora() } else { row };
                    vec![match self.activation_placement {
                        ActivationPlacement::Device => row,
                        ActivationPlacement::Host => row.with_offload(),
                    }]
                }
                Part::Prefill => vec![Row::prefill(shape, self.seq, dtype)],
                Part::Decode => vec![Row::decode(shape, self.prompt, self.tokens, dtype)],
                Part::Serve => {
                    let each = [self.prompt, self.tokens];
                    let row = Row::serve(shape, self.requests, each, dtype);
                    let row = row.with_adapters(self.adapters, &self.target_modules);
                    let row = match self.cache_dtype {
                        CacheDtype::Model => row,
                        CacheDtype::MxInt8 => row.with_rounded_cache(),
                    };
                    let row = if self.batch_invariant { row.with_batch_invariance() } else { row };
                    let row = if self.mixed_lengths { row.with_mixed_lengths() } else { row };
                    let row = match self.max_sequences {
                        Some(most) => row.with_max_sequences(most),
                        None => row,
                    };
                    let row = match self.max_batch_tokens {
                        Some(most) => row.with_max_batch_tokens(most),
                        None => row,
                    };
                    vec![if self.longest_first { row.with_longest_first() } else { row }]
                }
                Part::FirstToken => {
                    let (busy, prompt) = (self.requests, self.prompt);
                    vec![Row::first_token(shape, busy, prompt, self.seen_prompt, dtype)]
                }
            })
            .map(|row| row.with_quantization(quantization))
            .collect())
    }

    /// The ways to compute a row: on Metal, LoRA layers have one for each choice of `--matmul`, unless one
    /// was made.
    fn ways(&self, row: &Row, device: &Device) -> Vec<Way> {
        let matmuls: &[_] = match row.work {
            Work::LoraLinear { .. } if device.is_metal() && self.runtime.matmul.is_none() => {
                &[Matmul::Fused, Matmul::Candle, Matmul::Mps]
            }
            _ => &[],
        };
        if matmuls.is_empty() {
            return vec![Way { row: row.clone(), matmul: self.runtime.matmul }];
        }
        let named = |matmul: &Matmul| {
            let mut row = row.clone();
            match matmul {
                Matmul::Fused => {}
                Matmul::Candle => row.name.push_str("-candle"),
                Matmul::Mps => row.name.push_str("-mps"),
            }
            Way { row, matmul: Some(*matmul) }
        };
        matmuls.iter().map(named).collect()
    }

    fn plan(&self, row: &Row) -> Plan {
        if row.work.is_operation() {
            // Whoever wants few samples wants them soon.
            let milliseconds = self.samples.min(50) as u64;
            Plan { warm_up: Duration::from_millis(milliseconds), samples: self.samples }
        } else {
            Plan { warm_up: Duration::ZERO, samples: self.steps }
        }
    }
}

/// A row, and who makes the large products in it where it isn't the same for all rows.
struct Way {
    row: Row,
    matmul: Option<Matmul>,
}

impl Way {
    fn is_alternative(&self) -> bool {
        self.matmul.is_some_and(|matmul| matmul != Matmul::Fused)
    }

    fn measure(&self, plan: Plan, peaks: &Peaks, device: &Device) -> anyhow::Result<Measured> {
        set_matmul(self.matmul, device)?;
        let measured = measure(&self.row, plan, peaks, device, 0);
        // The rows after it have the default again.
        set_matmul(self.matmul.map(|_| Matmul::Fused), device)?;
        Ok(measured?)
    }
}

/// Times.
pub fn run(arguments: Arguments, terminal: impl Fn(bool) -> Terminal) -> anyhow::Result<u8> {
    if arguments.floors {
        output::write(&chips::floors()?)?;
        return Ok(SUCCESS);
    }
    let to_stdout = arguments.json.as_ref().is_some_and(|path| path.as_os_str() == "-");
    let terminal = terminal(to_stdout);
    arguments.check()?;
    set_threads(arguments.runtime.threads)?;
    let device = device(arguments.runtime.device)?;
    if arguments.activation_placement == ActivationPlacement::Host {
        check_host("activation_placement", &device)?;
    }
    // What the machine can do is measured with the default, whatever was asked for.
    set_matmul(arguments.runtime.matmul.map(|_| Matmul::Fused), &device)?;
    let rows = arguments.rows(&device)?;
    terminal.note("measuring what the machine can do");
    let mut report = Report {
        version: env!("CARGO_PKG_VERSION"),
        machine: Machine::this(),
        peaks: Peaks::measure(&device, LARGEST_BUFFER)?,
        rows: Vec::with_capacity(rows.len()),
    };
    if !to_stdout {
        let runtime = &arguments.runtime;
        let has_models = rows.iter().any(|row| !row.work.is_operation());
        let compute =
            has_models.then(|| describe_compute(runtime.dtype, runtime.base_compute, &device));
        output::write(&heading(&report, compute))?;
    }
    for row in &rows {
        for row in arguments.ways(row, &device) {
            let measured = row.measure(arguments.plan(&row.row), &report.peaks, &device);
            let measured = match measured {
                // A way that nobody asked for.
                Err(error) if arguments.runtime.matmul.is_none() && row.is_alternative() => {
                    terminal.note(format!("{}: not timed: {error:#}", row.row.name));
                    continue;
                }
                measured => measured?,
            };
            if !to_stdout {
                output::line(line(&measured))?;
            }
            report.rows.push(measured);
        }
    }
    match arguments.json {
        Some(_) if to_stdout => output::json(&report)?,
        Some(path) => files::write_bytes_atomic(&path, &serde_json::to_vec_pretty(&report)?)?,
        None => {}
    }
    Ok(SUCCESS)
}

/// The machine, its peaks and the names of the columns.
fn heading(report: &Report, compute: Option<String>) -> String {
    let (machine, peaks) = (&report.machine, &report.peaks);
    let giga = |rate: f64| format!("{:.0}", rate / 1e9);
    let read: Vec<String> = peaks
        .read
        .iter()
        .map(|&(size, rate)| format!("{} GB/s from {}", giga(rate), bytes(size as u64)))
        .collect();
    let mut rows = vec![
        (
            "Machine",
            format!(
                "{}, {} cores, {}, {}",
                machine.processor,
                machine.cores,
                bytes(machine.memory),
                machine.system
            ),
        ),
        ("Threads", peaks.threads.to_string()),
        ("Reading", read.join(", ")),
        ("Copying", format!("{} GB/s", giga(peaks.copy))),
        (
            "Arithmetic",
            format!(
                "{} GFLOP/s of f32 multiply-adds; linear {} in f32, {} in bf16, {} by packed weights",
                giga(peaks.fma),
                giga(peaks.linear_f32),
                giga(peaks.linear_bf16),
                giga(peaks.linear_packed)
            ),
        ),
    ];
    rows.extend(compute.map(|compute| ("Models", compute)));
    if let Some(launch) = peaks.launch {
        rows.push(("Launching", format!("{:.2} µs an operation that does nothing", launch * 1e6)));
    }
    let table = output::table(&rows);
    let (name, call, spread) = ("", "one call", "10-90 %");
    format!(
        "{table}\n{name:NAME$} {call:>TIME$} {spread:>SPREAD$} {:>TIME$} {:>SHARE$}\n",
        "in a queue", "of peak"
    )
}

/// Widths of the columns.
const NAME: usize = 44;
const TIME: usize = 10;
const SPREAD: usize = 17;
const SHARE: usize = 8;

fn line(measured: &Measured) -> String {
    let Summary { median, p10, p90, .. } = measured.call;
    let spread = format!("{} - {}", bare(p10, median), bare(p90, median));
    let queue = measured.queue.map_or(String::new(), |queue| time(queue.median));
    let share = format!("{:.0} %", 100.0 * measured.share_of_peak);
    let more =
        measured.tokens_per_second.map_or(String::new(), |rate| format!("  {rate:.0} tokens/s"));
    let memory =
        measured.peak_memory.map_or(String::new(), |peak| format!(", {} at most", bytes(peak)));
    format!(
        "{:NAME$} {:>TIME$} {spread:>SPREAD$} {queue:>TIME$} {share:>SHARE$}{more}{memory}",
        measured.row.name,
        time(median),
    )
}

/// The unit that reads best, and its name.
fn unit(seconds: f64) -> (f64, &'static str) {
    if seconds >= 1.0 {
        (1.0, "s")
    } else if seconds >= 1e-3 {
        (1e-3, "ms")
    } else {
        (1e-6, "µs")
    }
}

fn time(seconds: f64) -> String {
    format!("{} {}", bare(seconds, seconds), unit(seconds).1)
}

/// `seconds` in the unit of `other`, with three digits.
fn bare(seconds: f64, other: f64) -> String {
    let value = seconds / unit(other).0;
    let digits = if value < 10.0 {
        2
    } else if value < 100.0 {
        1
    } else {
        0
    };
    format!("{value:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_three_digits_and_one_unit() {
        assert_eq!(time(12.34e-6), "12.3 µs");
        assert_eq!(time(1.5e-3), "1.50 ms");
        assert_eq!(time(2.592), "2.59 s");
        assert_eq!(bare(0.9e-3, 1.2e-3), "0.90");
    }
}
