//! `jobs watch`: a job to its end.

use super::{Job, find, path};
use crate::errors::{INTERRUPTED, SUCCESS};
use crate::interrupt;
use crate::output::{self, Terminal};
use crate::progress::Bar;
use crate::remote::{Client, Failure};
use indexmap::IndexMap;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How often the server is asked: soon at first, as a small job ends soon.
const FIRST: Duration = Duration::from_millis(100);
const LAST: Duration = Duration::from_secs(2);
/// How long a server may be away.
const AWAY: Duration = Duration::from_secs(120);
/// How often it is looked whether to stop.
const GLANCE: Duration = Duration::from_millis(50);
/// Events that are asked for at once.
const PAGE: usize = 100;
/// Events that are read of a job that has told many before it was watched.
const MOST: usize = 10_000;

#[derive(Debug, Deserialize)]
struct Event {
    id: String,
    level: String,
    message: String,
    #[serde(default)]
    data: Option<Map<String, Value>>,
}

impl Event {
    /// A figure that it has.
    fn number(&self, name: &str) -> Option<f64> {
        self.data.as_ref()?.get(name)?.as_f64()
    }
}

#[derive(Deserialize)]
struct Events {
    data: Vec<Event>,
    #[serde(default)]
    has_more: bool,
}

/// Follows a job, and says how it ended.
pub fn run(client: &Client, id: &str, terminal: Terminal) -> anyhow::Result<u8> {
    let stop = interrupt::watch("");
    let mut watch =
        Watch { client, id, terminal, shown: Shown::new(terminal), known: Known::default() };
    let mut pause = FIRST;
    let mut away: Option<Instant> = None;
    let mut is_known = false;
    let (value, job) = loop {
        let wait = match watch.look() {
            Ok((value, job)) => {
                (away, is_known) = (None, true);
                if job.paused || job.finished_at.is_some() {
                    break (value, job);
                }
                pause
            }
            Err(failure) => {
                let is_new = away.is_none() && is_known && failure.may_pass().is_some();
                if is_new {
                    terminal.note(format!("{failure}; trying again"));
                }
                let since = *away.get_or_insert_with(Instant::now);
                match failure.may_pass() {
                    Some(wait) if is_known && since.elapsed() < AWAY => wait,
                    _ => return Err(failure.into()),
                }
            }
        };
        if !sleep(wait, &stop) {
            drop(watch);
            terminal.note(format!(
                "the job goes on; metal-candle jobs watch {id} shows it again, jobs cancel {id} ends it"
            ));
            return Ok(INTERRUPTED);
        }
        pause = (pause * 2).min(LAST);
    };
    drop(watch);
    interrupt::unwatch();
    end(client, &value, &job, terminal)
}

/// Says how a job ended.
fn end(client: &Client, value: &Value, job: &Job, terminal: Terminal) -> anyhow::Result<u8> {
    if terminal.json {
        output::json(value)?;
    }
    let id = &job.id;
    match (job.status(), &job.fine_tuned_model) {
        ("paused", _) => {
            terminal.note(format!("{id} is paused; metal-candle jobs resume {id} lets it go on"));
            Ok(SUCCESS)
        }
        ("succeeded", Some(model)) => {
            if !terminal.json {
                output::line(model)?;
            }
            terminal.note(format!(
                "Next: metal-candle chat --server {} --model {}\n      metal-candle jobs download {id}",
                output::shell_word(client.address()),
                output::shell_word(model)
            ));
            Ok(SUCCESS)
        }
        (status, _) => {
            let reason = job.failure().map(|reason| format!(": {reason}")).unwrap_or_default();
            Err(anyhow::anyhow!("{id} has {}{reason}", ended(status)))
        }
    }
}

fn ended(status: &str) -> String {
    match status {
        "cancelled" => "been cancelled".into(),
        other => other.into(),
    }
}

/// Waits; false if it is to stop.
fn sleep(time: Duration, stop: &AtomicBool) -> bool {
    let until = Instant::now() + time;
    while !stop.load(Ordering::SeqCst) {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return true;
        }
        std::thread::sleep(left.min(GLANCE));
    }
    false
}

struct Watch<'a> {
    client: &'a Client,
    id: &'a str,
    terminal: Terminal,
    shown: Shown,
    known: Known,
}

/// The events that were shown, in their order, and the step of each that has figures of one.
#[derive(Default)]
struct Known(IndexMap<String, Option<f64>>);

impl Known {
    fn add(&mut self, event: Event) {
        let step = event.number("step");
        self.0.insert(event.id, step);
    }

    /// Where an event is among them.
    fn place(&self, event: &Event) -> Option<usize> {
        self.0.get_index_of(&event.id)
    }

    /// Forgets those after the newest that the server has yet. If there are such, a run has gone on from a checkpoint:
    /// the last step that is left.
    fn forget_after(&mut self, newest: usize) -> Option<f64> {
        let is_again = newest + 1 < self.0.len();
        self.0.truncate(newest + 1);
        is_again.then(|| self.0.values().rev().find_map(|step| *step).unwrap_or(0.0))
    }
}

impl Watch<'_> {
    /// How the job stands; shows what it has told meanwhile.
    fn look(&mut self) -> Result<(Value, Job), Failure> {
        // Its end comes after all events.
        let found = find(self.client, self.id)?;
        let (new, newest_known) = self.new_events()?;
        if let Some(step) = newest_known.and_then(|place| self.known.forget_after(place)) {
            self.terminal.note(format!(
                "the server has gone on from a checkpoint, and tells again what came after step {step}"
            ));
        }
        for event in new {
            self.shown.show(&event, self.terminal);
            self.known.add(event);
        }
        Ok(found)
    }

    /// The events that were not shown yet, in the order of time, and the place of the newest that was.
    fn new_events(&self) -> Result<(Vec<Event>, Option<usize>), Failure> {
        let mut new: Vec<Event> = Vec::new();
        loop {
            let after = new.last().map(|event| format!("&after={}", event.id));
            let after = after.unwrap_or_default();
            let page = format!("{}/events?limit={PAGE}{after}", path(self.id));
            let Events { data, has_more } = self.client.read(&self.client.get(&page)?)?;
            let mut is_end = data.is_empty() || !has_more;
            let mut newest_known = None;
            for event in data {
                newest_known = self.known.place(&event);
                // Their ids stand in the next address.
                if newest_known.is_some() || super::id(&event.id).is_err() {
                    is_end = true;
                    break;
                }
                new.push(event);
            }
            if is_end || new.len() >= MOST {
                new.reverse();
                return Ok((new, newest_known));
            }
        }
    }
}

/// A bar in a terminal, lines elsewhere.
struct Shown {
    bar: Option<Bar>,
    draws: bool,
}

impl Shown {
    fn new(terminal: Terminal) -> Self {
        Self { bar: None, draws: terminal.draws_bars() }
    }

    fn show(&mut self, event: &Event, terminal: Terminal) {
        let trained =
            (event.number("step"), event.number("total_steps"), event.number("train_loss"));
        if let (true, (Some(step), Some(steps), Some(loss))) = (self.draws, trained) {
            let steps = steps.max(0.0) as u64;
            let bar = self.bar.get_or_insert_with(|| {
                Bar::new(terminal, "{bar:8} {pos}/{len}  {wide_msg} {elapsed}, {eta} left", steps)
            });
            if let Some(bar) = bar.drawn() {
                bar.set_position(step.max(0.0) as u64);
                let share = event.number("train_mean_token_accuracy");
                let share = share.map(|share| format!("  accuracy {share:.3}")).unwrap_or_default();
                bar.set_message(format!("loss {loss:.4}{share}"));
            }
            return;
        }
        let text = event.data.as_ref().and_then(|data| data.get("text")?.as_str());
        match (event.level.as_str(), text) {
            // What the model writes at a checkpoint.
            ("info", Some(text)) => {
                terminal.note(format!("{}: {}", event.message, metal_candle::readable(text)));
            }
            ("info", None) => terminal.note(&event.message),
            (level, _) => terminal.note(format!("{level}: {}", event.message)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_the_server_has_forgotten_is_forgotten_and_said() {
        let event = |id: &str, step: Option<u64>| -> Event {
            let data = step.map_or(json!({}), |step| json!({ "step": step }));
            serde_json::from_value(json!({"id": id, "level": "info", "message": id, "data": data}))
                .unwrap()
        };
        let mut known = Known::default();
        for (id, step) in [("created", None), ("one", Some(1)), ("saved", None), ("two", Some(2))] {
            known.add(event(id, step));
        }
        let place = |known: &Known, id| known.place(&event(id, None));
        let newest = place(&known, "two").unwrap();
        assert_eq!(known.forget_after(newest), None, "it still has all");
        let saved = place(&known, "saved").unwrap();
        assert_eq!(known.forget_after(saved), Some(1.0));
        assert_eq!((place(&known, "two"), place(&known, "saved")), (None, Some(saved)));
        assert_eq!(known.forget_after(0), Some(0.0), "it began from the beginning");
    }
}
