//! A model on this machine.

use super::{Answer, Partner};
use crate::engine::{Writer, Writing};
use crate::errors::usage;
use crate::models::Loaded;
use crate::output::Terminal;
use crate::prompts;
use metal_candle::generate::GenerateOptions;
use metal_candle::text::Message;
use metal_candle_serve::{Apart, Said};

/// A model, and what it has read of the conversation.
pub struct Local<'a> {
    loaded: &'a Loaded,
    options: GenerateOptions,
    writer: Writer<'a>,
}

impl<'a> Local<'a> {
    /// One that has read nothing yet.
    pub fn new(
        loaded: &'a Loaded,
        options: GenerateOptions,
        writing: &Writing,
        terminal: Terminal,
    ) -> anyhow::Result<Self> {
        Ok(Self { loaded, options, writer: Writer::new(loaded, writing, terminal)? })
    }
}

impl Partner for Local<'_> {
    fn answer(
        &mut self,
        messages: &[Message],
        turn: u64,
        answer: &mut Answer,
    ) -> anyhow::Result<()> {
        let Loaded { tokenizer, variables, .. } = self.loaded;
        let ids = prompts::encode_chat(tokenizer, messages, variables)?;
        let limit = self.loaded.model.config().context();
        if ids.len() >= limit {
            return Err(usage(format!(
                "the conversation has {} tokens, and this model was made for {limit}; /reset begins anew",
                ids.len()
            )));
        }
        let mut options = self.options.clone();
        // Two turns with the same draws would tend to repeat each other.
        options.sampling.seed = options.sampling.seed.wrapping_add(turn);
        let mut apart = Apart::of(tokenizer, !options.stop.is_empty())?;
        self.writer.write(ids, options, |piece| {
            let said = match &mut apart {
                Some(apart) => apart.push(piece)?,
                None => vec![Said::Answer(piece.text)],
            };
            say(answer, &said)?;
            Ok(!answer.is_stopped())
        })?;
        say(answer, &apart.map(|mut apart| apart.finish()).unwrap_or_default())
    }
}

fn say(answer: &mut Answer, said: &[Said]) -> anyhow::Result<()> {
    said.iter().try_for_each(|said| answer.push(said))
}
