//! An engine on a thread of its own.

use super::{
    Engine, EngineOptions, Event, Finished, Readers, Request, RequestId, Scored, Statistics,
};
use crate::foreign;
use crate::generate::Piece;
use crate::model::Model;
use crate::text::Tokenizer;
use crate::turns::Turns;
use crate::{Error, Result};
use std::collections::HashMap;
use std::ops::Range;
use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

/// Sends requests to an engine that runs on a thread of its own, which owns the device. It runs until the last of its
/// handles and answers are gone.
#[derive(Debug, Clone)]
pub struct Handle {
    sender: Sender<Command>,
    tickets: Arc<AtomicU64>,
    /// What the engine was busy with when it last began a step or came to rest, for as long as its thread lives.
    latest: Weak<Mutex<Statistics>>,
}

/// What a handle and an answer tell the engine. A ticket is the number of a request before it has one there.
enum Command {
    /// With the ticket of the first; the others have those that follow.
    Submit(u64, Vec<(Request, Listener)>),
    Cancel(u64),
    Statistics(Sender<Statistics>),
}

/// What is told of a request's events; it says whether it wants more.
type Listener = Box<dyn FnMut(Event) -> bool + Send>;

/// A request under way. Dropping it cancels the request, if it hasn't ended.
#[derive(Debug)]
#[must_use = "dropping it cancels the request"]
pub struct Ticket {
    number: u64,
    sender: Sender<Command>,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let _ = self.sender.send(Command::Cancel(self.number));
    }
}

/// The pieces of a text as they are written. Dropping it cancels the request.
#[derive(Debug)]
#[must_use = "dropping it cancels the request"]
pub struct Answers {
    events: Receiver<Event>,
    _ticket: Ticket,
    prompt: Vec<Scored>,
    finished: Option<Finished>,
    failed: bool,
}

impl Handle {
    /// Starts an engine.
    ///
    /// # Errors
    /// As [`Engine::new`], and when no thread can be had.
    pub fn start(
        model: &Arc<Model>,
        tokenizer: Option<Arc<Tokenizer>>,
        options: EngineOptions,
    ) -> Result<Self> {
        Self::over(Readers::new(model, &options)?, tokenizer, options)
    }

    pub(super) fn over(
        readers: Readers,
        tokenizer: Option<Arc<Tokenizer>>,
        options: EngineOptions,
    ) -> Result<Self> {
        let (sender, commands) = mpsc::channel();
        let latest = Arc::new(Mutex::new(Statistics::default()));
        let tickets = Arc::new(AtomicU64::new(0));
        let handle = Self { sender, tickets, latest: Arc::downgrade(&latest) };
        let run = move || {
            Thread {
                latest,
                turns: options.turns.clone(),
                engine: Engine::over(readers, tokenizer.as_deref(), options),
                callers: HashMap::new(),
                tickets: HashMap::new(),
            }
            .run(&commands);
        };
        std::thread::Builder::new()
            .name("engine".into())
            .spawn(run)
            .map_err(|error| Error::option("engine", format!("no thread for it: {error}")))?;
        Ok(handle)
    }

    /// Asks for a text. What is wrong with the request is the first item of the answer.
    pub fn submit(&self, request: Request) -> Answers {
        let (sender, events) = mpsc::channel();
        // An engine that is gone drops the other end of the events, which the answer tells.
        let ticket = self.submit_to(request, move |event| sender.send(event).is_ok());
        let prompt = Vec::new();
        Answers { events, _ticket: ticket, prompt, finished: None, failed: false }
    }

    /// Asks for a text whose events are told to `events` on the engine's thread, which must not be made to wait, until
    /// it says false. If it panics, that is logged, and counts as false: texts of others go on. Nothing is told if the
    /// engine's thread is gone.
    pub fn submit_to(
        &self,
        request: Request,
        events: impl FnMut(Event) -> bool + Send + 'static,
    ) -> Ticket {
        let number = self.submit_numbered([(request, events)]).start;
        Ticket { number, sender: self.sender.clone() }
    }

    /// [`Self::submit_to`] of texts that belong together, in this order. If one is refused, it is told so, and those behind
    /// it are dropped without an event.
    pub fn submit_together<E>(
        &self,
        requests: impl IntoIterator<Item = (Request, E)>,
    ) -> Vec<Ticket>
    where
        E: FnMut(Event) -> bool + Send + 'static,
    {
        let numbers = self.submit_numbered(requests);
        numbers.map(|number| Ticket { number, sender: self.sender.clone() }).collect()
    }

    fn submit_numbered<E>(&self, requests: impl IntoIterator<Item = (Request, E)>) -> Range<u64>
    where
        E: FnMut(Event) -> bool + Send + 'static,
    {
        let listened = |(request, events)| (request, Box::new(events) as Listener);
        let requests: Vec<_> = requests.into_iter().map(listened).collect();
        let count = requests.len() as u64;
        let first = self.tickets.fetch_add(count, Ordering::Relaxed);
        let _ = self.sender.send(Command::Submit(first, requests));
        first..first + count
    }

    /// Whether the engine's thread lives, however busy it is.
    pub fn is_alive(&self) -> bool {
        self.latest.strong_count() > 0
    }

    /// What the engine is busy with, after all that was asked of it before. A step under way is waited for.
    ///
    /// # Errors
    /// When its thread is gone.
    pub fn statistics(&self) -> Result<Statistics> {
        self.ask_statistics().recv().map_err(|_| gone())
    }

    /// As [`Self::statistics`], but what it was busy with when the step under way began, if that takes longer than
    /// `patience`.
    ///
    /// # Errors
    /// When its thread is gone.
    pub fn statistics_within(&self, patience: Duration) -> Result<Statistics> {
        match self.ask_statistics().recv_timeout(patience) {
            Ok(statistics) => Ok(statistics),
            Err(RecvTimeoutError::Disconnected) => Err(gone()),
            Err(RecvTimeoutError::Timeout) => {
                let latest = self.latest.upgrade().ok_or_else(gone)?;
                Ok(*latest.lock().unwrap_or_else(PoisonError::into_inner))
            }
        }
    }

    fn ask_statistics(&self) -> Receiver<Statistics> {
        let (sender, answer) = mpsc::channel();
        // An engine that is gone drops the other end, which the receiver tells.
        let _ = self.sender.send(Command::Statistics(sender));
        answer
    }
}

fn gone() -> Error {
    Error::option("engine", "its thread has ended")
}

impl Answers {
    /// How likely the prompt's tokens are, if that was asked for and a piece has been read.
    pub fn prompt(&self) -> &[Scored] {
        &self.prompt
    }

    /// How the text ended, once it has.
    pub fn finished(&self) -> Option<Finished> {
        self.finished
    }
}

impl Iterator for Answers {
    type Item = Result<Piece>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.finished.is_some() || self.failed {
            return None;
        }
        let event = loop {
            match self.events.recv() {
                Ok(Event::Prompt(prompt)) => self.prompt = prompt,
                event => break event,
            }
        };
        match event {
            Ok(Event::Prompt(_)) => None,
            Ok(Event::Piece(piece)) => Some(Ok(piece)),
            Ok(Event::Finished(finished)) => {
                self.finished = Some(finished);
                None
            }
            Ok(Event::Failed(error)) => {
                self.failed = true;
                Some(Err(error))
            }
            Err(_) => {
                self.failed = true;
                Some(Err(gone()))
            }
        }
    }
}

/// Tells a listener, and whether it wants more. A panic of one ends its own request alone.
fn tell(listener: &mut Listener, event: Event) -> bool {
    // One that has panicked isn't called again.
    panic::catch_unwind(AssertUnwindSafe(|| listener(event))).unwrap_or_else(|payload| {
        let reason = foreign::message(&*payload);
        tracing::warn!("what listens to a request panicked, and is told no more: {reason}");
        false
    })
}

struct Thread<'t> {
    /// The first that is dropped, so that who learns from an answer that the thread has ended finds it so.
    latest: Arc<Mutex<Statistics>>,
    engine: Engine<'t>,
    turns: Option<Arc<Turns>>,
    callers: HashMap<RequestId, (u64, Listener)>,
    tickets: HashMap<u64, RequestId>,
}

impl Thread<'_> {
    fn run(mut self, commands: &Receiver<Command>) {
        loop {
            if self.engine.is_idle() {
                if let Some(turns) = &self.turns {
                    turns.engine_rests();
                }
                self.tell_latest();
                match commands.recv() {
                    Ok(command) => self.take(command),
                    Err(_) => return,
                }
            }
            loop {
                match commands.try_recv() {
                    Ok(command) => self.take(command),
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => return,
                }
            }
            self.tell_latest();
            let events = {
                let _turn = self.turns.as_ref().map(|turns| turns.engine());
                self.engine.step()
            };
            for (id, event) in events {
                let last = matches!(event, Event::Finished(_) | Event::Failed(_));
                let Some((_, caller)) = self.callers.get_mut(&id) else { continue };
                let heard = tell(caller, event);
                if !heard {
                    self.engine.cancel(id);
                }
                if last || !heard {
                    self.forget(id);
                }
            }
        }
    }

    fn take(&mut self, command: Command) {
        match command {
            Command::Submit(first, requests) => {
                for (ticket, (request, mut caller)) in (first..).zip(requests) {
                    match self.engine.submit(request) {
                        Ok(id) => {
                            self.callers.insert(id, (ticket, caller));
                            self.tickets.insert(ticket, id);
                        }
                        Err(error) => {
                            // Who doesn't listen any more doesn't need to know.
                            tell(&mut caller, Event::Failed(error));
                            break;
                        }
                    }
                }
            }
            Command::Cancel(ticket) => {
                if let Some(id) = self.tickets.get(&ticket).copied() {
                    self.engine.cancel(id);
                    self.forget(id);
                }
            }
            Command::Statistics(caller) => drop(caller.send(self.engine.statistics())),
        }
    }

    fn tell_latest(&self) {
        *self.latest.lock().unwrap_or_else(PoisonError::into_inner) = self.engine.statistics();
    }

    fn forget(&mut self, id: RequestId) {
        if let Some((ticket, _)) = self.callers.remove(&id) {
            self.tickets.remove(&ticket);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Reads, readers, request, small};
    use super::*;

    #[test]
    fn texts_that_belong_together_are_taken_together_or_not_at_all() {
        let options = EngineOptions { max_waiting: 2, ..small() };
        let mut thread = Thread {
            latest: Arc::default(),
            turns: None,
            engine: Engine::over(readers(Reads::new(5), 5), None, options),
            callers: HashMap::new(),
            tickets: HashMap::new(),
        };
        let (sender, refused) = mpsc::channel();
        let mut submit = |tickets: Range<u64>| {
            let first = tickets.start;
            let of = |ticket| {
                let request = Request { follows: ticket != first, ..request(&[1], 1) };
                let sender = sender.clone();
                let listener = move |event: Event| {
                    matches!(event, Event::Failed(_)) && sender.send(ticket).is_ok()
                };
                (request, Box::new(listener) as Listener)
            };
            thread.take(Command::Submit(first, tickets.map(of).collect()));
            thread.engine.statistics().waiting
        };
        assert_eq!(submit(0..3), 3);
        // There is no room for the first, so there is none for the others.
        assert_eq!(submit(3..9), 3);
        assert_eq!(refused.try_iter().collect::<Vec<_>>(), [3]);
    }
}
