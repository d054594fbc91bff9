//! Data that a model reads without learning from them: the flags, and their batches.

use crate::bounds;
use crate::datasets::{self, Wanted};
use crate::errors::usage;
use crate::output::{Terminal, are};
use crate::settings::{Data, DataFlags, Loss};
use chrono::NaiveDateTime;
use clap::{Args, ValueEnum};
use metal_candle::data::{self, BatchOptions, Batcher, DataOptions, DataSource, tokenize};
use metal_candle::model::Config;
use metal_candle::text::Tokenizer;
use serde_json::{Map, Value};
use std::sync::Arc;

/// A file of a data folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Split {
    Train,
    Valid,
    Test,
}

/// Which data, and how they are read.
#[derive(Debug, Args)]
#[command(next_help_heading = "Data")]
pub struct Measured {
    /// A file of data, a folder with files of the splits, or the id of a data set on the hub; may be given several times
    #[arg(short, long, value_name = "PATH|ID", required = true)]
    data: Vec<String>,
    /// Which split of a folder or of a data set on the hub [default: to evaluate test if there is one, else valid; else all]
    #[arg(long, value_enum, conflicts_with = "data_split")]
    split: Option<Split>,
    #[command(flatten)]
    sources: DataFlags,
    /// Tokens of an example at most; what is longer is cut, and counted
    #[arg(long, value_name = "N", default_value_t = DataOptions::default().max_seq_length)]
    max_seq_length: usize,
    /// The tokens that the loss counts
    #[arg(long, value_enum, default_value_t)]
    loss_on: Loss,
    /// Rows of a batch
    #[arg(short, long, value_name = "N", default_value_t = BatchOptions::default().batch_size)]
    batch_size: usize,
}

impl Measured {
    /// Finds the data: of the split that was named, or else what is `usual`.
    pub fn find(&self, usual: Wanted, terminal: Terminal) -> anyhow::Result<Vec<DataSource>> {
        bounds::check("batch_size", self.batch_size, &bounds::BATCH_SIZE)?;
        self.data_options().validate().map_err(usage)?;
        let split = self.split.map(|split| match split {
            Split::Train => data::Split::Train,
            Split::Valid => data::Split::Valid,
            Split::Test => data::Split::Test,
        });
        let data = Data::of(&self.data).without_weights()?;
        let wanted = split.map_or(usual, |split| Wanted::Measuring(Some(split)));
        let found = datasets::find(&data, &self.sources, wanted, terminal)?;
        Ok(found.into_iter().map(|found| found.source).collect())
    }

    fn data_options(&self) -> DataOptions {
        DataOptions {
            max_seq_length: self.max_seq_length,
            loss_on: self.loss_on.for_data(),
            ..DataOptions::default()
        }
    }

    /// Tokens of an example, at most.
    pub fn max_seq_length(&self) -> usize {
        self.max_seq_length
    }

    /// Examples of so many batches.
    pub fn examples(&self, batches: usize) -> usize {
        batches.saturating_mul(self.batch_size)
    }

    /// What was found as batches, in order, for a model.
    pub fn batches(
        &self,
        sources: &[DataSource],
        (tokenizer, variables, now): (&Tokenizer, &Map<String, Value>, Option<NaiveDateTime>),
        config: &Config,
        terminal: Terminal,
    ) -> anyhow::Result<Batcher> {
        let options = DataOptions { variables: variables.clone(), now, ..self.data_options() };
        let dataset = tokenize(sources, tokenizer, &options)?.into_dataset()?;
        dataset.check_vocabulary(config.vocab_size)?;
        let context = config.context();
        let longer = dataset.longer_than(context);
        if longer > 0 {
            terminal.note(format!(
                "warning: {} longer than the {context} tokens that this model was made for; --max-seq-length {context} \
                 cuts them there",
                are(longer as u64, "example"),
            ));
        }
        terminal.note(&dataset.report);
        let options = BatchOptions {
            batch_size: self.batch_size,
            max_seq_length: self.max_seq_length,
            packing: false,
            seed: 0,
            shuffle: false,
            ..BatchOptions::default()
        };
        Ok(Batcher::new(Arc::new(dataset), options)?)
    }
}
