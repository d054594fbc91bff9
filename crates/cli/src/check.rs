//! `--check`: an export beside what it was made of.

use crate::errors::usage;
use crate::output::{self, Terminal, grouped, plural, table};
use anyhow::Context;
use candle_core::{DType, Device};
use clap::Args;
use metal_candle::adapter::{ADAPTER_CONFIG, Adapter};
use metal_candle::compare::{
    Aspect, Comparison, Divergence, Limits, Problem, Rounding, Samples, Side, WeightErrors,
    compare, compare_weights, keeps_weights,
};
use metal_candle::gguf::{self, is_gguf};
use metal_candle::model::Model;
use metal_candle::text::Tokenizer;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// How an export is held against its source.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Check")]
pub struct CheckFlags {
    /// Compare what is written with what it was made of: token ids, the chat template, weights and log-probabilities,
    /// in f32 on the CPU. Exits with 1 where they differ by more than the bits of the format explain
    #[arg(long)]
    pub check: bool,
    /// Texts or conversations to compare on, a file as `train` reads it [default: some that come with this program]
    #[arg(long, value_name = "FILE", requires = "check")]
    pub texts: Option<PathBuf>,
    /// The largest mean KL divergence, in nats a token [default: 1e-6 where nothing is rounded, 1e-4 in f16, 1e-2 in
    /// bf16; in fewer bits it is reported, and half as many likeliest tokens or twice the perplexity is too far]
    #[arg(long, value_name = "X", requires = "check", value_parser = nats, allow_negative_numbers = true)]
    pub max_kl: Option<f64>,
}

fn nats(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() && number >= 0.0 => Ok(number),
        _ => Err(format!("`{text}` is no number of at least 0")),
    }
}

/// What was found.
#[derive(Serialize)]
pub struct Checked {
    source: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    adapter: Option<String>,
    exported: String,
    agrees: bool,
    rounding: Rounding,
    texts: usize,
    renderings: usize,
    divergence: Divergence,
    limits: Limits,
    /// Where the export is a whole model.
    #[serde(skip_serializing_if = "Option::is_none")]
    weights: Option<WeightErrors>,
    problems: Vec<Problem>,
}

/// Whether a path is that of an adapter.
pub fn is_adapter(path: &Path) -> anyhow::Result<bool> {
    if is_gguf(path) {
        return Ok(gguf::holds_adapter(path)?);
    }
    Ok(path.join(ADAPTER_CONFIG).is_file() && !path.join("config.json").is_file())
}

/// An adapter's folder or GGUF file on a model.
fn load_adapter(model: &Model, path: &Path) -> anyhow::Result<Arc<Adapter>> {
    if !is_gguf(path) {
        return Ok(Arc::new(Adapter::load(model, path)?));
    }
    let staged = tempfile::tempdir()?;
    let folder = staged.path().join("adapter");
    gguf::save_as_peft(&folder, &gguf::read_adapter(path, model.config())?, "")?;
    Ok(Arc::new(Adapter::load(model, &folder)?))
}

/// The tokenizer of a model with the chat template of an adapter's folder, if that has one.
fn tokenizer(model: &Path, adapter: Option<&Path>) -> anyhow::Result<Tokenizer> {
    let mut tokenizer = Tokenizer::load(model)?;
    if let Some(folder) = adapter.filter(|path| !is_gguf(path)) {
        tokenizer.take_chat_template(folder)?;
    }
    Ok(tokenizer)
}

impl CheckFlags {
    /// What is compared on, if anything is to be.
    pub fn samples(&self) -> anyhow::Result<Option<Samples>> {
        Ok(match &self.texts {
            _ if !self.check => None,
            Some(path) => Some(Samples::read(path)?),
            None => Some(Samples::built_in()),
        })
    }

    /// Compares `exported`, a model or an adapter, with the model in `base` and the adapter on it.
    pub fn compare(
        &self,
        samples: &Samples,
        base: &Path,
        adapter: Option<&Path>,
        exported: &Path,
    ) -> anyhow::Result<Checked> {
        let load = |path: &Path| -> anyhow::Result<Model> {
            Ok(Model::load(path, DType::F32, &Device::Cpu)?)
        };
        let ours = tokenizer(base, adapter)?;
        let whole = !is_adapter(exported)?;
        if !whole && adapter.is_none() {
            return Err(usage(format!(
                "adapter: is missing; {} is an adapter, so --adapter has to name what it was made of",
                exported.display()
            )));
        }
        let named = || format!("the export {} cannot be read", exported.display());
        let theirs = match whole {
            true => tokenizer(exported, None),
            false => tokenizer(base, Some(exported)),
        };
        let theirs = theirs.with_context(named)?;
        let model = load(base)?;
        let on_it = adapter.map(|path| load_adapter(&model, path)).transpose()?;
        let source = Side { model: &model, adapter: on_it.as_ref(), tokenizer: &ours };
        let (comparison, rounding, mut weights) = if whole {
            let other = load(exported).with_context(named)?;
            let export = Side { model: &other, adapter: None, tokenizer: &theirs };
            let comparison = compare(source, export, samples)?;
            let rounding = Rounding::of(base, adapter.is_some(), exported)?;
            let merged = match &on_it {
                Some(adapter) => adapter.merge(model)?,
                None => model,
            };
            let weights = keeps_weights(&other)
                .then(|| compare_weights(&merged, &other, rounding))
                .transpose()?;
            (comparison, rounding, weights)
        } else {
            let other = load_adapter(&model, exported).with_context(named)?;
            let export = Side { model: &model, adapter: Some(&other), tokenizer: &theirs };
            (compare(source, export, samples)?, Rounding::None, None)
        };
        let mut limits = Limits::of(rounding);
        limits.mean_kl = self.max_kl.or(limits.mean_kl);
        let Comparison { texts, renderings, divergence, mut problems } = comparison;
        problems.extend(weights.iter_mut().flat_map(|it| std::mem::take(&mut it.problems)));
        problems.extend(limits.problems(&divergence));
        Ok(Checked {
            source: output::path(base),
            adapter: adapter.map(output::path),
            exported: output::path(exported),
            agrees: problems.is_empty(),
            rounding,
            texts,
            renderings,
            divergence,
            limits,
            weights,
            problems,
        })
    }
}

impl Checked {
    /// Whether there is nothing wrong with it.
    pub fn agrees(&self) -> bool {
        self.agrees
    }

    /// What was found, as a person reads it.
    pub fn tell(&self, terminal: Terminal) -> anyhow::Result<()> {
        let with = match &self.adapter {
            Some(adapter) => format!(" with {adapter}"),
            None => String::new(),
        };
        terminal.note(format!("{} beside {}{with}", self.exported, self.source));
        let is_fine = |aspect| !self.problems.iter().any(|problem| problem.aspect == aspect);
        let same = |aspect, of: String| match is_fine(aspect) {
            true => format!("the same {of}"),
            false => "not the same".to_string(),
        };
        let template = match self.renderings {
            0 if is_fine(Aspect::ChatTemplate) => "none on either side".to_string(),
            count => {
                same(Aspect::ChatTemplate, format!("in {}", plural(count as u64, "rendering")))
            }
        };
        let found = &self.divergence;
        let mut rows = vec![
            (
                "token ids",
                same(Aspect::TokenIds, format!("of {}", plural(self.texts as u64, "text"))),
            ),
            ("chat template", template),
            ("end tokens", same(Aspect::EndTokens, "as the source's".to_string())),
        ];
        if let Some(weights) = &self.weights {
            let worst = match &weights.worst {
                Some(row) if row.error != 0.0 => format!(
                    "; row {} of {} is off by {:.3} %, where its format explains {:.3} %",
                    row.row,
                    row.weight,
                    100.0 * row.error,
                    100.0 * row.limit
                ),
                _ => ", all the same".to_string(),
            };
            rows.push(("weights", format!("{} compared{worst}", weights.weights)));
        }
        rows.extend([
            (
                "perplexity",
                format!(
                    "{:.4}, in the source {:.4}, on {} tokens",
                    found.exported_perplexity,
                    found.source_perplexity,
                    grouped(found.tokens as u64)
                ),
            ),
            ("KL divergence", format!("mean {:.3e}, largest {:.3e}", found.mean_kl, found.max_kl)),
            (
                "likeliest token",
                format!("the same at {:.2} % of the places", 100.0 * found.top1_agreement),
            ),
        ]);
        output::prose(&table(&rows))?;
        if self.agrees {
            output::line(match self.rounding {
                Rounding::None => "They agree.",
                Rounding::F16 | Rounding::Bf16 => "They agree, but for rounding.",
                Rounding::FewerBits => "They agree as far as so few bits can.",
            })?;
        }
        Ok(())
    }

    /// An error if they don't agree.
    pub fn require(&self) -> anyhow::Result<()> {
        if self.agrees {
            return Ok(());
        }
        let aspects = self.problems.iter().map(|problem| {
            let of = match problem.aspect {
                Aspect::TokenIds => "token ids",
                Aspect::ChatTemplate => "chat template",
                Aspect::EndTokens => "end tokens",
                Aspect::Weights => "weights",
                Aspect::Probabilities => "probabilities",
            };
            format!("{of}: {}", problem.message)
        });
        let told = aspects.collect::<Vec<_>>().join("; ");
        anyhow::bail!("{} is not what its source is: {told}", self.exported)
    }
}
