//! The engine that writes a command's texts: its options as flags, and one text after the other.

use crate::errors::usage;
use crate::models::{self, Loaded};
use crate::output::{Terminal, grouped};
use anyhow::Context;
use clap::Args;
use metal_candle::engine::{
    CacheDtype, Engine, EngineOptions, Event, Finished, Request, RequestId, Statistics,
};
use metal_candle::generate::{GenerateOptions, Piece};
use metal_candle::model::Model;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// Requests that an engine is given before it has room for them.
const AHEAD: usize = 256;

/// How texts are written, one or many.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Engine")]
pub struct Writing {
    /// How the KV cache keeps its numbers: `model`, in the model's dtype, or `mxint8`, rounded to 8 bits with a scale
    /// for each 32, which takes about half of the memory
    #[arg(long, value_name = "DTYPE", default_value_t = EngineOptions::default().cache_dtype)]
    pub cache_dtype: CacheDtype,
    /// Give a text the same bits whatever other texts are written beside it, and in whatever pieces its prompt is
    /// read; it takes a little longer, and on GPUs before Hopper and on Metal few texts take as long as many
    #[arg(long)]
    pub batch_invariant: bool,
    /// Tokens to guess after the last of a text and to read together with it, while few texts are written; the texts
    /// stay what they are. 0 is none
    #[arg(long, value_name = "N", default_value_t = EngineOptions::default().draft_tokens)]
    pub draft_tokens: usize,
    /// A smaller model of the same vocabulary that guesses them, a folder or an id on the hub [default: what followed
    /// the last tokens where they stood before]
    #[arg(long, value_name = "DIR|ID", requires = "draft_tokens")]
    pub draft_model: Option<String>,
}

/// How many texts are written at once.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Engine")]
pub struct AtOnce {
    /// Texts that are read and written at once, at most
    #[arg(long, value_name = "N", default_value_t = EngineOptions::default().max_sequences)]
    pub max_sequences: usize,
    /// Tokens that the model reads at once, at most
    #[arg(long, value_name = "N", default_value_t = EngineOptions::default().max_batch_tokens)]
    pub max_batch_tokens: usize,
    /// Tokens that the KV cache has room for [default: what fits into most of a GPU's free memory, or a quarter of
    /// the machine's]
    #[arg(long, value_name = "N")]
    pub cache_tokens: Option<usize>,
}

impl Writing {
    /// An engine's options, but for the draft model.
    pub fn options(&self) -> EngineOptions {
        EngineOptions {
            cache_dtype: self.cache_dtype,
            batch_invariant: self.batch_invariant,
            draft_tokens: self.draft_tokens,
            ..EngineOptions::default()
        }
    }

    /// As [`Self::options`], for so many texts.
    pub fn options_for(&self, at_once: &AtOnce) -> EngineOptions {
        EngineOptions {
            max_sequences: at_once.max_sequences,
            max_batch_tokens: at_once.max_batch_tokens,
            cache_tokens: at_once.cache_tokens,
            ..self.options()
        }
    }

    /// The smaller model beside this one, if one is asked for.
    pub fn draft_model(
        &self,
        model: &Model,
        terminal: Terminal,
    ) -> anyhow::Result<Option<Arc<Model>>> {
        let Some(name) = &self.draft_model else { return Ok(None) };
        let folder = models::resolve(name, None, terminal)?;
        let draft = Model::load(&folder, model.dtype(), model.device())
            .with_context(|| format!("the draft model {name}"))?;
        Ok(Some(Arc::new(draft)))
    }
}

/// Says how many of the guessed tokens were right, if there were any.
pub fn tell_guesses(Statistics { drafted, accepted, .. }: Statistics) {
    if drafted > 0 {
        tracing::info!("{} of {} guessed tokens were right", grouped(accepted), grouped(drafted));
    }
}

/// A text as it was written.
pub struct Written {
    pub text: String,
    pub finished: Finished,
}

/// Writes all texts that are asked for, in their order, and calls `ended` for each that has ended.
pub fn write_all(
    engine: &mut Engine,
    requests: impl IntoIterator<Item = Request>,
    mut ended: impl FnMut(),
) -> anyhow::Result<Vec<Written>> {
    let mut requests = requests.into_iter().enumerate().peekable();
    let mut under_way: HashMap<RequestId, (usize, String)> = HashMap::new();
    let mut written = BTreeMap::new();
    while requests.peek().is_some() || !engine.is_idle() {
        while engine.statistics().waiting < AHEAD
            && let Some((index, request)) = requests.next()
        {
            under_way.insert(engine.submit(request)?, (index, String::new()));
        }
        for (id, event) in engine.step() {
            match event {
                Event::Prompt(_) => {}
                Event::Piece(piece) => {
                    if let Some((_, text)) = under_way.get_mut(&id) {
                        text.push_str(&piece.text);
                    }
                }
                Event::Finished(finished) => {
                    if let Some((index, text)) = under_way.remove(&id) {
                        written.insert(index, Written { text, finished });
                        ended();
                    }
                }
                Event::Failed(error) => return Err(error.into()),
            }
        }
    }
    tell_guesses(engine.statistics());
    Ok(written.into_values().collect())
}

/// Writes one text after the other. What a text has in common with those before it is not read again.
pub struct Writer<'a> {
    loaded: &'a Loaded,
    options: EngineOptions,
    /// Whose cache is made for as many tokens as were needed, and more when more are.
    engine: Option<Engine<'a>>,
    room: usize,
}

impl<'a> Writer<'a> {
    /// One that has read nothing yet.
    pub fn new(loaded: &'a Loaded, writing: &Writing, terminal: Terminal) -> anyhow::Result<Self> {
        let options = EngineOptions { max_sequences: 1, ..writing.options() };
        options.validate().map_err(usage)?;
        let draft_model = writing.draft_model(&loaded.model, terminal)?;
        let options = EngineOptions { draft_model, ..options };
        Ok(Self { loaded, options, engine: None, room: 0 })
    }

    /// Continues `prompt` as far as the model's context goes, at most, and gives the pieces to `take` until that wants
    /// no more; then there is no end to tell of.
    pub fn write(
        &mut self,
        prompt: Vec<u32>,
        mut options: GenerateOptions,
        mut take: impl FnMut(Piece) -> anyhow::Result<bool>,
    ) -> anyhow::Result<Option<Finished>> {
        let context = self.loaded.model.config().max_position_embeddings;
        let left = context.saturating_sub(prompt.len());
        if left == 0 {
            return Err(usage(format!(
                "there are {} tokens to continue, and this model was made for {context}",
                prompt.len()
            )));
        }
        options.max_tokens = options.max_tokens.min(left);
        let adapter = self.loaded.adapter.clone();
        let engine = self.engine_for(prompt.len() + options.max_tokens)?;
        let id = engine.submit(Request { prompt, options, adapter, ..Request::default() })?;
        while !engine.is_idle() {
            for (_, event) in engine.step() {
                match event {
                    Event::Prompt(_) => {}
                    Event::Piece(piece) => match take(piece) {
                        Ok(true) => {}
                        enough => {
                            engine.cancel(id);
                            return enough.map(|_| None);
                        }
                    },
                    Event::Finished(finished) => {
                        tell_guesses(engine.statistics());
                        return Ok(Some(finished));
                    }
                    Event::Failed(error) => return Err(error.into()),
                }
            }
        }
        Ok(None)
    }

    /// An engine whose cache has room for so many tokens.
    fn engine_for(&mut self, tokens: usize) -> anyhow::Result<&mut Engine<'a>> {
        if self.room < tokens {
            // Its memory goes first.
            self.engine = None;
            let context = self.loaded.model.config().max_position_embeddings;
            let room = tokens.max((2 * self.room).min(context));
            self.room = room.next_multiple_of(self.options.block_size);
        }
        let engine = match self.engine.take() {
            Some(engine) => engine,
            None => {
                let options =
                    EngineOptions { cache_tokens: Some(self.room), ..self.options.clone() };
                Engine::new(&self.loaded.model, Some(&self.loaded.tokenizer), options)?
            }
        };
        Ok(self.engine.insert(engine))
    }
}
