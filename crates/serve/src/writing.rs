//! From requests for the engine to what an answer is made of: all texts of the server are written through here.
//!
//! [`Texts`] are the events of one or many requests, as they come. Dropping them cancels what is still written, so a
//! client that leaves frees its places. So does one whose answer takes longer than the server's options allow: as a whole,
//! or, of a stream, from one token to the next. [`stream`] answers with events, which a task of their own makes: it ends when
//! the client leaves, or reads nothing for as long.

use crate::app::Shared;
use crate::error::{ApiError, Result};
use crate::replicas::Place;
use axum::http::{HeaderName, HeaderValue};
use axum::response::sse::{Event as ServerEvent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream::poll_fn;
use metal_candle::Error;
use metal_candle::engine::{Event, Finished, Request, Scored, Ticket};
use metal_candle::generate::Piece;
use serde::Serialize;
use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tracing::Instrument;

/// Requests of one client's request that the engine has at once, at most; the others follow them.
const MOST_AT_ONCE: usize = 256;
/// Events that are ready for a client before their maker waits for it.
const READY_EVENTS: usize = 32;
/// How often a stream without events says that it is there.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// The code of errors about texts that the model or its cache has no room for.
pub const TOO_LONG: &str = "context_length_exceeded";
/// What errors are about when the engine is gone.
const ENGINE: &str = "engine";

/// What becomes of a request.
#[derive(Debug)]
pub enum Written {
    /// The prompt's tokens with their log-probabilities, before all else, where they are asked for.
    Prompt(Vec<Scored>),
    /// A token.
    Piece(Piece),
    /// The text ended.
    Finished(Finished),
}

/// The texts of some requests, told as they are written.
pub struct Texts {
    app: Shared,
    place: Arc<Place>,
    waiting: VecDeque<(usize, Request)>,
    under_way: HashMap<usize, UnderWay>,
    sender: UnboundedSender<(usize, Event)>,
    events: UnboundedReceiver<(usize, Event)>,
    /// What was looked at already.
    first: Option<(usize, Event)>,
    /// When all has to be written, unless it is streamed.
    deadline: Option<Instant>,
}

/// A request that the engine has. Dropping the ticket cancels it.
struct UnderWay {
    _ticket: Ticket,
    begun: Instant,
    first_token: Option<Duration>,
}

/// Where the engine sends a request's events.
struct Caller {
    index: usize,
    sender: UnboundedSender<(usize, Event)>,
    ended: bool,
}

impl Caller {
    fn tell(&mut self, event: Event) -> bool {
        self.ended |= matches!(event, Event::Finished(_) | Event::Failed(_));
        self.sender.send((self.index, event)).is_ok()
    }
}

impl Drop for Caller {
    /// An engine that is gone drops its callers, which nobody would learn of.
    fn drop(&mut self) {
        if !self.ended {
            let gone = Error::option(ENGINE, "it stopped before the text ended");
            // Whoever cancelled the request doesn't listen.
            let _ = self.sender.send((self.index, Event::Failed(gone)));
        }
    }
}

impl Texts {
    /// Begins to write at this place, and waits until the first token is there, or the engine has refused.
    ///
    /// # Errors
    /// What the engine says of a request that it can't write, and a 504 when it takes too long.
    pub async fn begin(
        app: &Shared,
        place: Arc<Place>,
        requests: Vec<Request>,
        streams: bool,
    ) -> Result<Self> {
        place.add(requests.len().saturating_sub(1));
        let (sender, events) = mpsc::unbounded_channel();
        let mut texts = Self {
            app: app.clone(),
            place,
            waiting: requests.into_iter().enumerate().collect(),
            under_way: HashMap::new(),
            sender,
            events,
            first: None,
            deadline: (!streams).then(|| Instant::now() + app.options.timeout),
        };
        texts.submit();
        texts.first = match texts.receive().await? {
            Some((_, Event::Failed(error))) => return Err(refusal(error)),
            first => first,
        };
        Ok(texts)
    }

    /// The engine's next event. One that takes too long cancels all.
    async fn receive(&mut self) -> Result<Option<(usize, Event)>> {
        let timeout = self.app.options.timeout;
        let left = match self.deadline {
            Some(deadline) => deadline.saturating_duration_since(Instant::now()),
            None => timeout,
        };
        match tokio::time::timeout(left, self.events.recv()).await {
            Ok(event) => Ok(event),
            Err(_) => {
                self.cancel();
                let seconds = timeout.as_secs();
                let message = match self.deadline {
                    Some(_) => format!(
                        "it was not written within {seconds} s, as long as it may take; ask for less, or for a stream"
                    ),
                    None => {
                        format!("nothing was written for {seconds} s, as long as that may take")
                    }
                };
                Err(ApiError::timed_out(message))
            }
        }
    }

    fn cancel(&mut self) {
        self.waiting.clear();
        self.under_way.clear();
    }

    fn submit(&mut self) {
        let room = MOST_AT_ONCE.saturating_sub(self.under_way.len()).min(self.waiting.len());
        if room == 0 {
            return;
        }
        let next: Vec<_> = self.waiting.drain(..room).collect();
        let indices: Vec<usize> = next.iter().map(|(index, _)| *index).collect();
        let requests = next.into_iter().map(|(index, request)| {
            let mut caller = Caller { index, sender: self.sender.clone(), ended: false };
            // Only the first may be refused because too many wait: what is written would be lost with one of the others.
            // There are never more of them at once than when it was taken.
            let request = Request { follows: index > 0, ..request };
            (request, move |event| caller.tell(event))
        });
        let tickets = self.place.replica.engine.submit_together(requests);
        let begun = Instant::now();
        for (index, ticket) in indices.into_iter().zip(tickets) {
            self.under_way.insert(index, UnderWay { _ticket: ticket, begun, first_token: None });
        }
    }

    /// What happens next, and to which of the requests; `None` when all texts have ended.
    ///
    /// # Errors
    /// When one of them cannot be written to its end, or all take too long; the others are cancelled.
    pub async fn next(&mut self) -> Result<Option<(usize, Written)>> {
        loop {
            let next = match self.first.take() {
                None if self.under_way.is_empty() => return Ok(None),
                None => self.receive().await?,
                first => first,
            };
            // The sender of this struct keeps the channel open.
            let Some((index, event)) = next else { return Ok(None) };
            let Some(request) = self.under_way.get_mut(&index) else { continue };
            match event {
                Event::Prompt(scored) => return Ok(Some((index, Written::Prompt(scored)))),
                Event::Piece(piece) => {
                    request.first_token.get_or_insert_with(|| request.begun.elapsed());
                    return Ok(Some((index, Written::Piece(piece))));
                }
                Event::Finished(finished) => {
                    let whole = request.begun.elapsed();
                    let first_token = request.first_token.unwrap_or(whole);
                    self.app.metrics.finished(&finished, first_token, whole);
                    self.under_way.remove(&index);
                    self.submit();
                    return Ok(Some((index, Written::Finished(finished))));
                }
                Event::Failed(error) => {
                    self.cancel();
                    return Err(refusal(error));
                }
            }
        }
    }
}

/// Why the engine can't write a text.
fn refusal(error: Error) -> ApiError {
    match &error {
        Error::Option { option, .. } if option == ENGINE => ApiError::internal(error),
        // No request has a field of this name.
        Error::Option { option, .. } if option == "grammar" => ApiError::invalid(error.to_string()),
        Error::Option { option, .. } if option == "max_tokens" => {
            ApiError::from(error).coded(TOO_LONG)
        }
        _ => error.into(),
    }
}

/// What was read and written for a request, as OpenAI's API has it.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Usage {
    /// Tokens of the prompts.
    pub prompt_tokens: usize,
    /// Tokens of the texts.
    pub completion_tokens: usize,
    /// Both.
    pub total_tokens: usize,
    /// Of the prompts.
    pub prompt_tokens_details: PromptDetails,
    /// Of the texts.
    pub completion_tokens_details: CompletionDetails,
}

/// Of a prompt's tokens.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct PromptDetails {
    /// Those whose keys and values were in the cache.
    pub cached_tokens: usize,
}

/// Of a text's tokens.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct CompletionDetails {
    /// Those that the model thought with before its answer.
    pub reasoning_tokens: usize,
}

impl Usage {
    /// Adds a choice's text; a prompt counts once, with its first choice.
    pub fn add(&mut self, finished: &Finished, first_choice: bool) {
        if first_choice {
            self.prompt_tokens += finished.prompt_tokens;
            self.prompt_tokens_details.cached_tokens += finished.cached_tokens;
        }
        self.completion_tokens += finished.tokens;
        self.total_tokens = self.prompt_tokens + self.completion_tokens;
    }
}

/// Nobody reads the stream any more.
#[derive(Debug)]
pub struct Gone;

/// Where the events of a stream go.
#[derive(Debug)]
pub struct Out {
    sender: mpsc::Sender<ServerEvent>,
    patience: Duration,
}

impl Out {
    /// Sends an event.
    ///
    /// # Errors
    /// When the client has left or doesn't read.
    pub async fn send(&self, event: ServerEvent) -> Result<(), Gone> {
        match tokio::time::timeout(self.patience, self.sender.send(event)).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) | Err(_) => Err(Gone),
        }
    }

    /// Sends an object as an event without a name.
    ///
    /// # Errors
    /// As [`Self::send`].
    pub async fn object(&self, object: &impl Serialize) -> Result<(), Gone> {
        self.send(json(ServerEvent::default(), object)).await
    }

    /// Sends an object as an event of this name.
    ///
    /// # Errors
    /// As [`Self::send`].
    pub async fn named(&self, name: &str, object: &impl Serialize) -> Result<(), Gone> {
        self.send(json(ServerEvent::default().event(name), object)).await
    }

    /// Says that a stream of OpenAI's has ended, after the error that ended it if there was one.
    ///
    /// # Errors
    /// As [`Self::send`].
    pub async fn end(&self, error: Option<ApiError>) -> Result<(), Gone> {
        if let Some(error) = error {
            self.object(&error.body()).await?;
        }
        self.send(ServerEvent::default().data("[DONE]")).await
    }
}

fn json(event: ServerEvent, object: &impl Serialize) -> ServerEvent {
    // The objects of this crate are structs and maps by strings, which are all JSON.
    event.json_data(object).expect("an object that is JSON")
}

/// Answers with the events that `make` sends.
pub fn stream<F>(app: &Shared, make: impl FnOnce(Out) -> F) -> Response
where
    F: Future<Output = Result<(), Gone>> + Send + 'static,
{
    let (sender, mut events) = mpsc::channel(READY_EVENTS);
    let making = make(Out { sender: sender.clone(), patience: app.options.timeout });
    let told = async move {
        tokio::select! {
            // Whoever has gone needs to know nothing.
            _ = making => {}
            () = sender.closed() => {}
        }
    };
    tokio::spawn(told.in_current_span());
    let events =
        poll_fn(move |context| events.poll_recv(context).map(|it| it.map(Ok::<_, Infallible>)));
    let mut response =
        Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response();
    // nginx would hold events back otherwise.
    let unbuffered = HeaderName::from_static("x-accel-buffering");
    response.headers_mut().insert(unbuffered, HeaderValue::from_static("no"));
    response
}
