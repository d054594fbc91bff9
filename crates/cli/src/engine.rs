//! The engine that writes a command's texts: its options as flags, and one text after the other.

use crate::errors::usage;
use crate::models::{self, Loaded, Source};
use crate::output::{Terminal, grouped};
use crate::thoughts::Text;
use anyhow::Context;
use clap::Args;
use metal_candle::engine::{
    CacheDtype, Engine, EngineOptions, Event, Finished, Request, RequestId, Statistics,
};
use metal_candle::generate::{FinishReason, GenerateOptions, Piece};
use metal_candle::gguf::is_gguf;
use metal_candle::model::Model;
use metal_candle::text::Tokenizer;
use std::collections::HashMap;
use std::sync::Arc;

/// Requests that an engine is given before it has room for them. It sees of as many how long they may take.
const AHEAD: usize = 4096;
/// Tokens of a text that there is room for from the beginning, if that many may be written.
const USUAL_TOKENS: usize = 4096;

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

impl AtOnce {
    /// The first flag that asks for something else than usually.
    pub fn unusual(&self) -> Option<&'static str> {
        let usual = EngineOptions::default();
        let flags = [
            ("--max-sequences", self.max_sequences == usual.max_sequences),
            ("--max-batch-tokens", self.max_batch_tokens == usual.max_batch_tokens),
            ("--cache-tokens", self.cache_tokens == usual.cache_tokens),
        ];
        flags.into_iter().find_map(|(flag, is_usual)| (!is_usual).then_some(flag))
    }
}

impl Writing {
    /// Whether nothing else is asked for than usually, also of how many texts are written at once.
    pub fn is_usual(&self, at_once: &AtOnce) -> bool {
        let usual = EngineOptions::default();
        at_once.unusual().is_none()
            && self.cache_dtype == usual.cache_dtype
            && self.batch_invariant == usual.batch_invariant
            && self.draft_tokens == usual.draft_tokens
            && self.draft_model.is_none()
    }

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

    /// That the smaller model, if one is asked for, has the vocabulary of the model that is about to be loaded. It may come
    /// without a tokenizer, as texts are read and written by the larger one's.
    pub fn check_draft(&self, source: &Source, terminal: Terminal) -> anyhow::Result<()> {
        let Some(name) = &self.draft_model else { return Ok(()) };
        let folder = models::resolve(name, None, terminal)?;
        if !is_gguf(&folder) && !folder.join("tokenizer.json").exists() {
            return Ok(());
        }
        let draft = Tokenizer::load(&folder).with_context(|| format!("the draft model {name}"))?;
        let model = Tokenizer::load(&source.folder(terminal)?)?;
        match draft.first_difference(&model) {
            Some(id) => {
                let both = [("draft model", &draft), ("model", &model)];
                Err(models::another_vocabulary("draft_model", id, both))
            }
            None => Ok(()),
        }
    }

    /// The smaller model beside this one, if one is asked for.
    pub fn draft_model(
        &self,
        loaded: &Loaded,
        terminal: Terminal,
    ) -> anyhow::Result<Option<Arc<Model>>> {
        let Some(name) = &self.draft_model else { return Ok(None) };
        let folder = models::resolve(name, None, terminal)?;
        let model = &loaded.model;
        let draft = Model::load(&folder, model.dtype(), model.device())
            .with_context(|| format!("the draft model {name}"))?;
        Ok(Some(Arc::new(draft)))
    }
}

/// Says how many of the tokens that were guessed since `before` were right, if there were any.
fn tell_guesses(now: Statistics, before: Statistics) {
    let (drafted, accepted) = (now.drafted - before.drafted, now.accepted - before.accepted);
    if drafted > 0 {
        tracing::info!("{} of {} guessed tokens were right", grouped(accepted), grouped(drafted));
    }
}

/// A text as it was written.
pub struct Written {
    pub text: String,
    pub finished: Finished,
}

/// Writes the texts of numbered requests to one tokenizer's model, and tells `ended` what became of each. `goes_on` hears after
/// every step how many tokens there are; whether it has let all of them end.
pub fn write_all(
    engine: &mut Engine,
    tokenizer: &Tokenizer,
    mut requests: impl Iterator<Item = (usize, Request)>,
    mut ended: impl FnMut(usize, Result<Written, String>) -> anyhow::Result<()>,
    mut goes_on: impl FnMut(u64) -> bool,
) -> anyhow::Result<bool> {
    let mut under_way: HashMap<RequestId, (usize, Text, String)> = HashMap::new();
    let (mut more, mut tokens) = (true, 0u64);
    while more || !engine.is_idle() {
        while more && engine.statistics().waiting < AHEAD {
            let Some((index, request)) = requests.next() else {
                more = false;
                break;
            };
            let text = Text::new(tokenizer, &request.options)?;
            match engine.submit(request) {
                Ok(id) => {
                    under_way.insert(id, (index, text, String::new()));
                }
                Err(error) => ended(index, Err(error.to_string()))?,
            }
        }
        for (id, event) in engine.step() {
            let Some((_, text, written)) = under_way.get_mut(&id) else { continue };
            let finished = match event {
                Event::Prompt(_) => continue,
                Event::Piece(piece) => {
                    tokens += u64::from(piece.token.is_some());
                    written.push_str(&text.push(piece)?);
                    continue;
                }
                Event::Finished(finished) => Ok(finished),
                Event::Failed(error) => Err(error.to_string()),
            };
            if let Some((index, mut text, written)) = under_way.remove(&id) {
                let text = written + &text.finish();
                ended(index, finished.map(|finished| Written { text, finished }))?;
            }
        }
        if !goes_on(tokens) {
            return Ok(false);
        }
    }
    tell_guesses(engine.statistics(), Statistics::default());
    Ok(true)
}

/// Writes one text after the other. What a text has in common with those before it is not read again.
pub struct Writer<'a> {
    loaded: &'a Loaded,
    options: EngineOptions,
    /// Whose cache is made for as many tokens as were needed, and more when more are.
    engine: Option<Engine<'a>>,
}

impl<'a> Writer<'a> {
    /// One that has read nothing yet.
    pub fn new(loaded: &'a Loaded, writing: &Writing, terminal: Terminal) -> anyhow::Result<Self> {
        let options = EngineOptions { max_sequences: 1, ..writing.options() };
        options.validate().map_err(usage)?;
        let draft_model = writing.draft_model(loaded, terminal)?;
        let options = EngineOptions { draft_model, ..options };
        Ok(Self { loaded, options, engine: None })
    }

    /// Makes room for a text of so many tokens to be continued by so many; how many can be.
    ///
    /// # Errors
    /// When none can be, as the text is as long as the model's context.
    pub fn prepare(&mut self, prompt: usize, max_tokens: usize) -> anyhow::Result<usize> {
        let context = self.loaded.model.config().context();
        let left = max_tokens.min(context.saturating_sub(prompt));
        let room = |engine: &Option<Engine>| {
            let blocks = engine.as_ref().map_or(0, |engine| engine.statistics().blocks);
            blocks * self.options.block_size
        };
        let before = room(&self.engine);
        if left > 0 && before < prompt + left {
            // Its memory goes first.
            self.engine = None;
            let needed = (prompt + left).max(context.min(2 * before));
            // More is seldom written than may be: then as much as fits.
            let cache_tokens =
                (left <= USUAL_TOKENS).then(|| needed.next_multiple_of(self.options.block_size));
            let options = EngineOptions { cache_tokens, ..self.options.clone() };
            let Loaded { model, tokenizer, .. } = self.loaded;
            self.engine = Some(Engine::new(model, Some(tokenizer), options)?);
        }
        match left.min(room(&self.engine).saturating_sub(prompt)) {
            0 => Err(usage(format!(
                "there are {prompt} tokens to continue, and this model was made for {context}, or there is no memory for more"
            ))),
            left => Ok(left),
        }
    }

    /// Continues `prompt` as far as the model's context goes, at most, and gives the pieces to `take` until that wants
    /// no more; then there is no end to tell of.
    pub fn write(
        &mut self,
        prompt: Vec<u32>,
        mut options: GenerateOptions,
        mut take: impl FnMut(Piece) -> anyhow::Result<bool>,
    ) -> anyhow::Result<Option<Finished>> {
        let wanted = options.max_tokens;
        options.max_tokens = self.prepare(prompt.len(), wanted)?;
        let cut = options.max_tokens < wanted;
        let adapter = self.loaded.adapter.clone();
        let Some(engine) = &mut self.engine else { return Ok(None) };
        let before = engine.statistics();
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
                        tell_guesses(engine.statistics(), before);
                        if cut && finished.reason == FinishReason::Length {
                            tracing::warn!(
                                "the text ends where the model's context or the memory for it does"
                            );
                        }
                        return Ok(Some(finished));
                    }
                    Event::Failed(error) => return Err(error.into()),
                }
            }
        }
        Ok(None)
    }
}
