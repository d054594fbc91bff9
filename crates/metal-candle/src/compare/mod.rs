//! An exported model beside its source: does it read texts as the same tokens, render conversations the same, have the
//! same weights but for rounding, and say the same?
//!
//! Of each token that the samples have after their first, with p the probabilities that the source gives to what may
//! come there and q those of the export:
//!
//! ```text
//! perplexity = exp(-mean log p(token))        KL = Σ p · (log p - log q)
//! ```
//!
//! Both models are read by this library, so what another program does otherwise with the same files isn't seen.

mod divergence;
mod limits;
mod samples;
mod weights;

pub use divergence::Divergence;
pub use limits::{Limits, Rounding};
pub use samples::{Conversation, Samples};
pub use weights::{WeightErrors, WorstRow, compare_weights, keeps_weights};

use std::sync::Arc;

use chrono::NaiveDateTime;
use serde::Serialize;

use crate::adapter::Adapter;
use crate::files::cut_to;
use crate::model::Model;
use crate::text::{RenderOptions, Tokenizer};
use crate::{Error, Result};

/// Tokens of a text that are read at most.
const LONGEST: usize = 1024;
/// Characters of a text that a message shows.
const SHOWN: usize = 40;

/// A model with what it reads and writes by.
#[derive(Debug, Clone, Copy)]
pub struct Side<'a> {
    /// The model.
    pub model: &'a Model,
    /// An adapter on it.
    pub adapter: Option<&'a Arc<Adapter>>,
    /// Its tokenizer, with its chat template.
    pub tokenizer: &'a Tokenizer,
}

/// Something of a model that a comparison looks at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Aspect {
    /// The token ids of texts.
    TokenIds,
    /// What conversations are rendered as.
    ChatTemplate,
    /// The tokens that end what the model writes.
    EndTokens,
    /// The values of its weights.
    Weights,
    /// The probabilities that it gives to tokens.
    Probabilities,
}

/// A difference that no rounding explains.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Problem {
    /// In what.
    pub aspect: Aspect,
    /// Where, what the source has and what the export has.
    pub message: String,
}

impl Problem {
    fn new(aspect: Aspect, message: impl Into<String>) -> Self {
        Self { aspect, message: message.into() }
    }
}

/// What a comparison of token ids, templates and probabilities found.
#[derive(Debug, Clone, Serialize)]
pub struct Comparison {
    /// Texts whose token ids were compared, rendered conversations among them.
    pub texts: usize,
    /// Renderings of conversations that were compared; none where neither side has a chat template.
    pub renderings: usize,
    /// How far probabilities are apart.
    pub divergence: Divergence,
    /// Differences of token ids, templates and end tokens.
    pub problems: Vec<Problem>,
}

/// Compares an export with its source on the source's tokens.
///
/// Logits are computed some rows at a time, never those of all tokens.
///
/// # Errors
/// When the samples have no two tokens in a text, or a model cannot compute.
pub fn compare(source: Side, exported: Side, samples: &Samples) -> Result<Comparison> {
    let mut problems = Vec::new();
    let mut texts = texts_of(source.tokenizer, source.model.config().vocab_size, samples);
    let rendered = compare_templates(source.tokenizer, exported.tokenizer, samples, &mut problems);
    let renderings = rendered.len();
    texts.extend(rendered);
    let mut sequences = Vec::new();
    let mut different = 0;
    for text in &texts {
        let ids = source.tokenizer.encode(&text.text, text.add_special)?;
        let found = exported.tokenizer.encode(&text.text, text.add_special);
        if let Some(message) = difference_of_ids(text, source.tokenizer, &ids, found) {
            // One is enough to see what is wrong.
            if different == 0 {
                problems.push(Problem::new(Aspect::TokenIds, message));
            }
            different += 1;
        }
        if text.is_read {
            sequences.push(ids);
        }
    }
    if let Some(problem) = problems.iter_mut().find(|it| it.aspect == Aspect::TokenIds) {
        problem.message += &format!("; {different} of {} texts differ", texts.len());
    }
    problems.extend(compare_ends(source.tokenizer, exported.tokenizer));
    let longest = [source, exported].map(|side| side.model.config().context());
    let longest = longest.into_iter().fold(LONGEST, usize::min);
    sequences.iter_mut().for_each(|ids| ids.truncate(longest));
    sequences.retain(|ids| ids.len() > 1);
    let divergence = divergence::measure(source, exported, &sequences)?;
    Ok(Comparison { texts: texts.len(), renderings, divergence, problems })
}

/// A text whose token ids are compared.
struct Text {
    text: String,
    add_special: bool,
    /// Whether its probabilities are compared, too.
    is_read: bool,
}

/// The plain texts: those of the samples, and one with the tokens that a template writes around messages. Tokens beyond
/// the model's vocabulary are none of them, as it can't read them and an export may be without them.
fn texts_of(tokenizer: &Tokenizer, vocabulary: usize, samples: &Samples) -> Vec<Text> {
    let plain = |text: &String| Text { text: text.clone(), add_special: true, is_read: true };
    let mut texts: Vec<Text> = samples.texts.iter().map(plain).collect();
    let named = [tokenizer.bos_id(), tokenizer.eos_id(), tokenizer.pad_id()];
    let special = named.into_iter().flatten().chain(tokenizer.eos_ids().iter().copied());
    let special = special.filter(|id| (*id as usize) < vocabulary);
    let special: Vec<String> = special.filter_map(|id| tokenizer.id_to_token(id)).collect();
    if !special.is_empty() {
        let text = format!("a {} b\n{}", special.join(" c "), special.concat());
        texts.push(Text { text, add_special: false, is_read: false });
    }
    texts
}

/// Renders every conversation on both sides, as it is and up to where the model is to answer, and gives the source's
/// renderings.
fn compare_templates(
    source: &Tokenizer,
    exported: &Tokenizer,
    samples: &Samples,
    problems: &mut Vec<Problem>,
) -> Vec<Text> {
    let templates = [source, exported].map(Tokenizer::chat_template);
    let problem = |message: &str| Problem::new(Aspect::ChatTemplate, message);
    let (ours, theirs) = match templates {
        [Some(ours), Some(theirs)] => (ours, theirs),
        [None, None] => return Vec::new(),
        [Some(_), None] => {
            problems.push(problem("the export has no chat template, the source has one"));
            return Vec::new();
        }
        [None, Some(_)] => {
            problems.push(problem("the export has a chat template, the source has none"));
            return Vec::new();
        }
    };
    let mut rendered = Vec::new();
    let mut is_new = true;
    for conversation in &samples.conversations {
        let answered = conversation.messages.last().is_some_and(|it| it.role() == "assistant");
        let before = conversation.messages.len() - usize::from(answered);
        let ways = [(conversation.messages.len(), false), (before, true)];
        for (count, add_generation_prompt) in ways {
            let Some(messages) = conversation.messages.get(..count).filter(|it| !it.is_empty())
            else {
                continue;
            };
            let options = RenderOptions {
                add_generation_prompt,
                tools: conversation.tools.as_deref(),
                variables: None,
                // The same on both sides.
                now: Some(NaiveDateTime::default()),
            };
            let message = match (ours.render(messages, &options), theirs.render(messages, &options))
            {
                (Ok(ours), Ok(theirs)) if ours == theirs => {
                    let is_read = !add_generation_prompt;
                    rendered.push(Text { text: ours, add_special: false, is_read });
                    continue;
                }
                (Ok(ours), Ok(theirs)) => difference_of_texts(&ours, &theirs),
                (Ok(_), Err(error)) => {
                    format!("the export's fails where the source's doesn't: {error}")
                }
                (Err(error), Ok(_)) => {
                    format!("the source's fails where the export's doesn't: {error}")
                }
                // Both refuse it, as those without a system message do.
                (Err(_), Err(_)) => continue,
            };
            if std::mem::take(&mut is_new) {
                problems.push(problem(&message));
            }
        }
    }
    rendered
}

/// Where two texts part, and how they go on.
fn difference_of_texts(source: &str, exported: &str) -> String {
    let same = source.chars().zip(exported.chars()).take_while(|(a, b)| a == b).count();
    let rest = |text: &str| cut_to(&text.chars().skip(same).collect::<String>(), SHOWN);
    format!(
        "a conversation is rendered otherwise from character {same} on: {:?} in the source, {:?} in the export",
        rest(source),
        rest(exported)
    )
}

/// How the token ids of a text differ, if they do.
fn difference_of_ids(
    text: &Text,
    tokenizer: &Tokenizer,
    source: &[u32],
    exported: Result<Vec<u32>>,
) -> Option<String> {
    let shown = cut_to(&text.text, SHOWN);
    let exported = match exported {
        Ok(exported) if exported == source => return None,
        Ok(exported) => exported,
        Err(error) => return Some(format!("of {shown:?}, the export has none: {error}")),
    };
    let same = source.iter().zip(&exported).take_while(|(a, b)| a == b).count();
    let rest = |ids: &[u32]| match ids.get(same) {
        Some(id) => {
            let token = tokenizer.id_to_token(*id).unwrap_or_default();
            format!("{id} ({:?} in the source's vocabulary)", cut_to(&token, SHOWN))
        }
        None => "no more".to_string(),
    };
    Some(format!(
        "of {shown:?}, token {same} is {} in the source and {} in the export",
        rest(source),
        rest(&exported)
    ))
}

/// Whether each token that ends the source's texts ends the export's, too: without it an answer goes on.
fn compare_ends(source: &Tokenizer, exported: &Tokenizer) -> Option<Problem> {
    let theirs = exported.eos_ids();
    let missing = source.eos_ids().iter().copied().find(|id| !theirs.contains(id))?;
    let token = source.id_to_token(missing).unwrap_or_default();
    Some(Problem::new(
        Aspect::EndTokens,
        format!(
            "token {missing} ({:?}) ends the source's answers and not the export's, which {theirs:?} end",
            cut_to(&token, SHOWN)
        ),
    ))
}

/// An error where there is nothing to compare.
fn nothing() -> Error {
    Error::option("texts", "have no two tokens that follow each other; give longer ones")
}
