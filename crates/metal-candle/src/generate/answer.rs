//! A text while it is written: from the logits of what comes next to pieces of text, until it ends.

use super::sampler::{Row, Sampled, Sampler, SamplingOptions};
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
}

impl Default for GenerateOptions {
    fn default() -> Self {
        Self {
            max_tokens: 256,
            sampling: SamplingOptions::default(),
            stop: Vec::new(),
            ignore_eos: false,
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
}

/// What was written of a text, and how it goes on.
pub(crate) struct Answer<'t> {
    max_tokens: usize,
    eos: Vec<u32>,
    sampler: Sampler,
    stops: StopStrings,
    stream: Option<DecodeStream<'t>>,
    tokens: Vec<u32>,
    finished: Option<FinishReason>,
}

impl<'t> Answer<'t> {
    /// Without a tokenizer there are tokens alone.
    pub fn new(tokenizer: Option<&'t Tokenizer>, options: GenerateOptions) -> Result<Self> {
        options.validate()?;
        let GenerateOptions { max_tokens, sampling, stop, ignore_eos } = options;
        if tokenizer.is_none() && !stop.is_empty() {
            return Err(Error::option("stop", "needs a tokenizer, and there is none"));
        }
        let eos = tokenizer.filter(|_| !ignore_eos).map(|it| it.eos_ids().to_vec());
        Ok(Self {
            max_tokens,
            eos: eos.unwrap_or_default(),
            sampler: Sampler::new(sampling)?,
            stops: StopStrings::new(stop)?,
            stream: tokenizer.map(Tokenizer::decode_stream),
            tokens: Vec::new(),
            finished: None,
        })
    }

    /// Why the text ended, once it has.
    pub fn finish_reason(&self) -> Option<FinishReason> {
        self.finished
    }

    /// The tokens written so far, without the end-of-sequence token.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Tokens that may still be written.
    pub fn left(&self) -> usize {
        self.max_tokens - self.tokens.len()
    }

    /// How the token is drawn that follows `text`: a prompt, what was written, and `ahead` tokens that may be.
    pub fn row<'a>(&'a self, text: &'a [u32], ahead: usize) -> Row<'a> {
        let written = self.tokens.len() + ahead;
        Row {
            sampler: &self.sampler,
            ahead,
            history: text,
            generated: &text[text.len() - written..],
        }
    }

    /// Goes on with the token that was drawn.
    pub fn take(&mut self, sampled: Sampled) -> Result<Piece> {
        self.sampler.advance();
        let (token, logprob) = (Some(sampled.id), sampled.logprob);
        if self.eos.contains(&sampled.id) {
            self.finished = Some(FinishReason::EndOfSequence);
            return Ok(Piece { text: self.flush()?, token, logprob });
        }
        self.tokens.push(sampled.id);
        let decoded = match &mut self.stream {
            Some(stream) => stream.push(sampled.id)?.unwrap_or_default(),
            None => String::new(),
        };
        let mut result = self.stops.push(&decoded);
        if result.stopped {
            self.finished = Some(FinishReason::Stop);
        } else if self.tokens.len() >= self.max_tokens {
            self.finished = Some(FinishReason::Length);
            result.emit.push_str(&self.flush()?);
        }
        Ok(Piece { text: result.emit, token, logprob })
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
