//! The embedding and the head of an adapter under construction: which of them get what, and what can't be together.

use super::methods::{TableUpdate, table};
use super::{LoraConfig, Parameters, PartKind, Plan, Resolved, TokenIndices};
use crate::autograd::Parameter;
use crate::model::Model;
use crate::{Error, Result};

/// What is trained of the embedding or the head, by its place in the plan.
pub(super) struct PlannedTable {
    pub path: &'static str,
    trained: PlannedFactors,
}

enum PlannedFactors {
    LowRank { a: usize, b: usize, scale: f64 },
    Rows { rows: usize, tokens: Vec<u32> },
}

impl PlannedTable {
    /// A low-rank update.
    pub fn low_rank(
        model: &Model,
        config: &LoraConfig,
        layer: &Resolved,
        plan: &mut Plan,
    ) -> Result<Self> {
        let Resolved { path, rank, scale } = layer;
        let unsupported = if config.dora {
            Some("use_dora")
        } else if config.start.takes_from_weight() {
            Some("init_lora_weights")
        } else {
            None
        };
        if let Some(option) = unsupported {
            return Err(Error::option(
                option,
                format!(
                    "is for linear layers; `{path}` among the target_modules is none of the decoder"
                ),
            ));
        }
        let (vocabulary, hidden) = model.frozen().shape(model.embedding).dims2()?;
        if *rank > vocabulary.max(hidden) {
            return Err(Error::option(
                "rank",
                format!("is {rank}, more than `{path}` has features"),
            ));
        }
        let (path, a, b) = if path == Model::HEAD {
            let a = plan.add(PartKind::A, path, (hidden, *rank));
            (Model::HEAD, a, plan.add(PartKind::B, path, (*rank, vocabulary)))
        } else {
            let a = plan.add(PartKind::EmbeddingA, path, (vocabulary, *rank));
            (Model::EMBEDDING, a, plan.add(PartKind::EmbeddingB, path, (*rank, hidden)))
        };
        Ok(Self { path, trained: PlannedFactors::LowRank { a, b, scale: *scale } })
    }

    /// The rows of tokens, beside the low-rank updates of other tables.
    pub fn add_rows(
        model: &Model,
        config: &LoraConfig,
        tables: &mut Vec<Self>,
        plan: &mut Plan,
    ) -> Result<()> {
        let Some(tokens) = &config.trainable_token_indices else { return Ok(()) };
        let wrong = |problem: String| Error::option(TokenIndices::KEY, problem);
        let (vocabulary, hidden) = model.frozen().shape(model.embedding).dims2()?;
        let mut by_path = tokens.by_path()?;
        if model.head.is_none()
            && let Some(of_embedding) = by_path.get(Model::EMBEDDING)
        {
            // The head is the embedding and follows it.
            if by_path.get(Model::HEAD).is_some_and(|of_head| of_head != of_embedding) {
                return Err(wrong(
                    "has other tokens of lm_head than of embed_tokens, which are one weight in this model".into(),
                ));
            }
            by_path.shift_remove(Model::HEAD);
        }
        for (path, tokens) in by_path {
            if let Some(token) = tokens.iter().find(|token| **token as usize >= vocabulary) {
                return Err(wrong(format!(
                    "has token {token}, but the vocabulary of this model is {vocabulary}"
                )));
            }
            if tokens.len() > hidden {
                return Err(wrong(format!(
                    "has {} tokens, more than the hidden size {hidden}; train `{path}` by modules_to_save",
                    tokens.len()
                )));
            }
            let rows = plan.add(PartKind::Rows, path, (tokens.len(), hidden));
            let table =
                Self { path, trained: PlannedFactors::Rows { rows, tokens: tokens.to_vec() } };
            if let Some(other) = tables.iter().find(|other| table.changes(model, other.path)) {
                let other = other.path;
                return Err(wrong(format!(
                    "has rows of `{path}`, but `{other}` among the target_modules changes them too; expected one \
                     of both"
                )));
            }
            tables.push(table);
        }
        Ok(())
    }

    pub fn is_rows(&self) -> bool {
        matches!(self.trained, PlannedFactors::Rows { .. })
    }

    /// Whether it changes the table of this path.
    pub fn changes(&self, model: &Model, path: &str) -> bool {
        let follows = self.is_rows() && self.path == Model::EMBEDDING && model.head.is_none();
        path == self.path || (path == Model::HEAD && follows)
    }

    /// The update, whose rows start as the model's. `stream` is apart from those of the layers.
    pub fn update(
        self,
        model: &Model,
        config: &LoraConfig,
        parameters: &Parameters,
        views: &[Parameter],
        stream: u64,
    ) -> Result<TableUpdate> {
        let is_head = self.path == Model::HEAD;
        match self.trained {
            PlannedFactors::LowRank { a, b, scale } => {
                let (a, b) = (views[a].clone(), views[b].clone());
                Ok(match is_head {
                    true => TableUpdate::head(a, b, scale, config.dropout, stream),
                    false => TableUpdate::embedding(a, b, scale),
                })
            }
            PlannedFactors::Rows { rows, tokens } => {
                let id = model.head.filter(|_| is_head).unwrap_or(model.embedding);
                let weight = &*model.dense(id)?;
                parameters.set(views[rows].id(), &table::frozen_rows(weight, &tokens)?)?;
                TableUpdate::rows(views[rows].clone(), weight, &tokens)
            }
        }
    }
}
