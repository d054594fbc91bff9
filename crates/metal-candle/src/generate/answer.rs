//! A text while it is written: from the logits of what comes next to pieces of text, until it ends.

use super::grammar::{Constraint, Grammar};
use super::penalties::Penalties;
use super::sampler::{MOST_LIKELIEST, Row, Sampled, Sampler, SamplingOptions};
use super::stop::StopStrings;
use crate::text::{DecodeStream, Tokenizer};
use crate::{Error, Result, bounds};
use serde::{Deserialize, Serialize};

/// When and how a text is continued.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerateOptions {
    /// Tokens at most.
    pub max_tokens: usize,
    /// How tokens are drawn.
    pub sampling: SamplingOptions,
    /// The text ends before the first of these.
    pub stop: Vec<String>,
    /// Go on after an end-of-sequence token.
    pub ignore_eos: bool,
    /// How many of the likeliest tokens are told beside each that is drawn, up to 20.
    pub top_logprobs: usize,
    /// Whether the text continues the prompt's, as a completion does, so that a space which it begins with stays.
    /// Tokenizers such as Llama 2's take that off a text, which is right for an answer to a message.
    pub continues_prompt: bool,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        Self {
            max_tokens: 256,
            sampling: SamplingOptions::default(),
            stop: Vec::new(),
            ignore_eos: false,
            top_logprobs: 0,
            continues_prompt: false,
        }
    }
}

impl GenerateOptions {
    /// Checks every value.
    ///
    /// # Errors
    /// [`Error::Option`] about the first that cannot work.
    pub fn validate(&self) -> Result<()> {
        bounds::check("max_tokens", self.max_tokens, &bounds::TOKENS)?;
        bounds::check("top_logprobs", self.top_logprobs, &(0..=MOST_LIKELIEST))?;
        self.sampling.validate()?;
        StopStrings::new(self.stop.iter().map(String::as_str)).map(drop)
    }
}

/// Why a text ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The model wrote an end-of-sequence token.
    EndOfSequence,
    /// It wrote a stop string.
    Stop,
    /// It wrote as many tokens as were allowed.
    Length,
}

/// What one step of decoding gives.
#[derive(Debug, Clone, PartialEq)]
pub struct Piece {
    /// Text that is complete: never a part of a character, never a part of a stop string. Often
    /// empty.
    pub text: String,
    /// The token drawn; `None` for text that was held back and came free at the end.
    pub token: Option<u32>,
    /// The token's log-probability, in nats.
    pub logprob: f64,
    /// The likeliest tokens of its place and their log-probabilities, the first the likeliest, if they are asked for.
    pub likeliest: Vec<(u32, f64)>,
}

/// What was written of a text, and how it goes on.
pub(crate) struct Answer<'t> {
    max_tokens: usize,
    eos: Vec<u32>,
    sampler: Sampler,
    penalties: Penalties,
    top_logprobs: usize,
    constraint: Option<Constraint>,
    stops: StopStrings,
    stream: Option<DecodeStream<'t>>,
    tokens: Vec<u32>,
    finished: Option<FinishReason>,
}

impl<'t> Answer<'t> {
    /// What follows `prompt`. Without a tokenizer there are tokens alone.
    pub fn new(
        tokenizer: Option<&'t Tokenizer>,
        options: GenerateOptions,
        prompt: &[u32],
    ) -> Result<Self> {
        options.validate()?;
        let GenerateOptions {
            max_tokens,
            sampling,
            stop,
            ignore_eos,
            top_logprobs,
            continues_prompt,
        } = options;
        if tokenizer.is_none() && !stop.is_empty() {
            return Err(Error::option("stop", "needs a tokenizer, and there is none"));
        }
        let eos = tokenizer.filter(|_| !ignore_eos).map(|it| it.eos_ids().to_vec());
        let stream = tokenizer.map(|tokenizer| match continues_prompt {
            true => tokenizer.decode_stream_after(prompt),
            false => Ok(tokenizer.decode_stream()),
        });
        Ok(Self {
            max_tokens,
            eos: eos.unwrap_or_default(),
            penalties: Penalties::new(&sampling, prompt, &[]),
            sampler: Sampler::new(sampling)?,
            top_logprobs,
            constraint: None,
            stops: StopStrings::new(stop)?,
            stream: stream.transpose()?,
            tokens: Vec::new(),
            finished: None,
        })
    }

    /// What is written follows a grammar, and ends with it.
    pub fn with_grammar(mut self, grammar: &Grammar) -> Result<Self> {
        self.constraint = Some(grammar.begin()?);
        Ok(self)
    }

    /// Whether it follows a grammar.
    pub fn is_constrained(&self) -> bool {
        self.constraint.is_some()
    }

    /// Finds which tokens may come next, where not all may.
    pub fn find_allowed(&mut self) -> Result<()> {
        self.constraint.as_mut().map_or(Ok(()), Constraint::find_allowed)
    }

    /// How many of the likeliest tokens are told.
    pub fn top_logprobs(&self) -> usize {
        self.top_logprobs
    }

    /// Why the text ended, once it has.
    pub fn finish_reason(&self) -> Option<FinishReason> {
        self.finished
    }

    /// Which of the stop strings ended the text, by its place among them.
    pub fn stop_found(&self) -> Option<usize> {
        self.stops.found()
    }

    /// The tokens written so far, without the end-of-sequence token.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Tokens that may still be written.
    pub fn left(&self) -> usize {
        self.max_tokens - self.tokens.len()
    }

    /// How the token is drawn that follows the prompt, what was written, and `guesses`, tokens that may be.
    pub fn row<'a>(&'a self, guesses: &'a [u32]) -> Row<'a> {
        Row {
            sampler: &self.sampler,
            penalties: &self.penalties,
            guesses,
            allowed: self.constraint.as_ref().and_then(Constraint::allowed),
            top_logprobs: self.top_logprobs,
        }
    }

    /// Goes on with the token that was drawn.
    pub fn take(&mut self, sampled: Sampled) -> Result<Piece> {
        self.sampler.advance();
        let Sampled { id, logprob, likeliest } = sampled;
        let token = Some(id);
        let is_whole = match &mut self.constraint {
            Some(constraint) => constraint.take(id)?,
            None => false,
        };
        if self.eos.contains(&id) {
            self.finished = Some(FinishReason::EndOfSequence);
            return Ok(Piece { text: self.flush()?, token, logprob, likeliest });
        }
        self.tokens.push(id);
        self.penalties.push(id);
        let decoded = match &mut self.stream {
            Some(stream) => stream.push(id)?.unwrap_or_default(),
            None => String::new(),
        };
        let mut result = self.stops.push(&decoded);
        if result.stopped {
            self.finished = Some(FinishReason::Stop);
        } else if is_whole {
            self.finished = Some(FinishReason::EndOfSequence);
            result.emit.push_str(&self.flush()?);
        } else if self.tokens.len() >= self.max_tokens {
            self.finished = Some(FinishReason::Length);
            result.emit.push_str(&self.flush()?);
        }
        Ok(Piece { text: result.emit, token, logprob, likeliest })
    }

    /// What was held back, at the end of the text.
    fn flush(&mut self) -> Result<String> {
        let rest = match self.stream.take() {
            Some(stream) => stream.finish()?.unwrap_or_default(),
            None => String::new(),
        };
        let result = self.stops.push(&rest);
        let mut text = result.emit;
        if result.stopped {
            self.finished = Some(FinishReason::Stop);
        } else {
            text.push_str(&self.stops.finish());
        }
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn a_continuation_keeps_the_space_that_it_begins_with_and_an_answer_does_not() {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures");
        // Its decoder takes a space off a text, as that of Llama 2 does.
        let tokenizer = Tokenizer::load(&fixtures.join("tokenizer-sp")).unwrap();
        let write = |(prompt, text): (&str, &str), continues_prompt| {
            let prompt = tokenizer.encode(prompt, true).unwrap();
            let all = tokenizer.encode(text, true).unwrap();
            let written = all.strip_prefix(prompt.as_slice()).unwrap();
            let options = GenerateOptions {
                max_tokens: written.len(),
                continues_prompt,
                ..GenerateOptions::default()
            };
            let mut answer = Answer::new(Some(&tokenizer), options, &prompt).unwrap();
            let sampled = |&id: &u32| Sampled { id, logprob: 0.0, likeliest: Vec::new() };
            let pieces = written.iter().map(|id| answer.take(sampled(id)).unwrap().text);
            pieces.collect::<String>()
        };
        let story = ("Once upon a", "Once upon a time");
        assert_eq!(write(story, true), " time");
        assert_eq!(write(story, false), "time");
        let code = ("def f():\n", "def f():\n    return 1");
        assert_eq!(write(code, true), "    return 1");
        assert_eq!(write(code, false), "   return 1");
    }
}
