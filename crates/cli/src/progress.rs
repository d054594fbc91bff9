//! Training as a person sees it: a bar in a terminal, one line a report elsewhere.

use crate::output::{BARS, Terminal, grouped, say};
use indicatif::{ProgressBar, ProgressStyle};
use metal_candle::Result;
use metal_candle::train::{Metric, MetricsSink, TOKEN_ACCURACY, eva};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// A bar in a terminal, which goes when it is dropped; nothing elsewhere.
pub struct Bar(Option<ProgressBar>);

impl Bar {
    pub fn new(terminal: Terminal, template: &str, length: u64) -> Self {
        Self(terminal.draws_bars().then(|| {
            let style = ProgressStyle::with_template(template)
                .unwrap_or_else(|_| ProgressStyle::default_bar())
                .progress_chars("━╸─");
            BARS.add(ProgressBar::new(length).with_style(style))
        }))
    }

    /// The bar, where there is one.
    pub fn drawn(&self) -> Option<&ProgressBar> {
        self.0.as_ref()
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}

/// How often a bar is drawn where nothing happens.
const TICK: Duration = Duration::from_millis(500);

/// Shows a run's events.
pub struct Progress {
    quiet: bool,
    bar: Bar,
    total: u64,
    first: u64,
    started: Instant,
}

impl Progress {
    /// For a run of `total` steps of which `done` are taken.
    pub fn new(terminal: Terminal, total: u64, done: u64) -> Self {
        let template = "{bar:8} {pos}/{len}  {wide_msg} {elapsed}, {eta} left";
        let bar = Bar::new(terminal, template, total);
        if let Some(bar) = bar.drawn() {
            bar.set_position(done);
            bar.reset_eta();
            bar.enable_steady_tick(TICK);
        }
        Self { quiet: terminal.quiet, bar, total, first: done, started: Instant::now() }
    }

    fn left(&self, step: u64) -> String {
        let done = step.saturating_sub(self.first).max(1);
        let seconds = self.started.elapsed().as_secs_f64() / done as f64
            * self.total.saturating_sub(step) as f64;
        clock(seconds)
    }
}

impl MetricsSink for Progress {
    fn log(&mut self, metric: &Metric) -> Result<()> {
        if self.quiet {
            return Ok(());
        }
        let total = self.total;
        match metric {
            Metric::Train {
                step,
                loss,
                learning_rate,
                tokens_per_second,
                processed_tokens_per_second,
                metrics,
                ..
            } => {
                let rate = |tokens: f64| grouped(tokens.max(0.0) as u64);
                let message =
                    format!("loss {loss:.4}{}  lr {learning_rate:.1e}", most_telling(metrics));
                let (targets, read) =
                    (rate(*tokens_per_second), rate(*processed_tokens_per_second));
                match self.bar.drawn() {
                    Some(bar) => {
                        bar.set_position(*step);
                        // Not more than 80 columns have room for.
                        bar.set_message(format!("{message}  {targets} target tok/s"));
                    }
                    None => say(format!(
                        "step {step}/{total}  {message}  {targets} target tokens/s ({read} read)  \
                         {} elapsed, {} left",
                        clock(self.started.elapsed().as_secs_f64()),
                        self.left(*step)
                    )),
                }
            }
            Metric::Evaluation { step, loss, perplexity, metrics, .. } => say(format!(
                "step {step}/{total}  validation loss {loss:.4}{}{}",
                perplexity.map_or_else(String::new, |it| format!(", perplexity {it:.3}")),
                most_telling(metrics)
            )),
            Metric::Skipped { step, reason } => {
                say(format!("warning: step {step} changed nothing: {reason}"));
            }
            Metric::Sample { step, prompt, text } => {
                say(format!("step {step}/{total}  {prompt} → {}", text.trim()));
            }
            Metric::Checkpoint { path, .. } => tracing::info!("saved {}", path.display()),
            _ => {}
        }
        Ok(())
    }

    fn step(&mut self, step: u64) -> Result<()> {
        if let Some(bar) = self.bar.drawn() {
            bar.set_position(step);
        }
        Ok(())
    }
}

/// Batches between two lines about a search where no bar is drawn.
const LINE_EVERY: usize = 10;

/// Shows how far EVA's search for directions is.
pub struct Search {
    terminal: Terminal,
    bar: Bar,
}

impl Search {
    pub fn new(terminal: Terminal) -> Self {
        let bar = Bar::new(terminal, "{bar:8} {pos}/{len}  {wide_msg} {elapsed}", 0);
        if let Some(bar) = bar.drawn() {
            bar.enable_steady_tick(TICK);
        }
        Self { terminal, bar }
    }

    pub fn show(&mut self, progress: eva::Progress) {
        let eva::Progress { batches, settled, inputs } = progress;
        match self.bar.drawn() {
            Some(bar) => {
                bar.set_length(inputs as u64);
                bar.set_position(settled as u64);
                bar.set_message(format!("inputs of layers known for EVA, batch {}", batches + 1));
            }
            None if batches == 0 => {
                self.terminal.note("reading data for EVA's start");
            }
            None if batches.is_multiple_of(LINE_EVERY) && settled < inputs => {
                self.terminal.note(format!(
                    "EVA: {settled} of {inputs} inputs of layers known after {batches} batches"
                ))
            }
            None => {}
        }
    }
}

/// What is most worth knowing of compared answers, how often the better one has the higher reward, and by how much; or
/// of tokens.
pub fn most_telling(metrics: &BTreeMap<String, f64>) -> String {
    let named = [
        ("accuracy", "rewards/accuracies"),
        ("margin", "rewards/margins"),
        ("kl", "kl"),
        ("accuracy", TOKEN_ACCURACY),
    ];
    let found = named.iter().filter_map(|(word, name)| Some((word, metrics.get(*name)?)));
    found.map(|(word, value)| format!("  {word} {value:.3}")).collect()
}

/// Seconds as hours, minutes and seconds.
pub fn clock(seconds: f64) -> String {
    let seconds = seconds.max(0.0).round() as u64;
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    match (hours, minutes) {
        (0, 0) => format!("{seconds}s"),
        (0, _) => format!("{minutes}m{seconds:02}s"),
        _ => format!("{hours}h{minutes:02}m"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bar_moves_with_every_step_and_says_its_tokens_with_a_report() {
        let bar = ProgressBar::hidden().with_position(2);
        let mut progress = Progress {
            quiet: false,
            bar: Bar(Some(bar.clone())),
            total: 9,
            first: 2,
            started: Instant::now(),
        };
        for step in 3..=5 {
            progress.step(step).unwrap();
            assert_eq!(bar.position(), step);
        }
        let report = serde_json::json!({
            "event": "train", "step": 6, "epoch": 1.0, "loss": 0.5, "learning_rate": 1e-4,
            "gradient_norm": 1.0, "tokens": 10, "tokens_per_second": 1234.0, "trained_tokens": 10,
            "processed_tokens_per_second": 5678.0, "skipped": 0, "peak_memory": null,
        });
        progress.log(&serde_json::from_value(report).unwrap()).unwrap();
        assert!(bar.message().contains("1 234 target tok/s"), "{}", bar.message());
    }

    #[test]
    fn times_are_short() {
        assert_eq!(clock(4.4), "4s");
        assert_eq!(clock(64.0), "1m04s");
        assert_eq!(clock(7260.0), "2h01m");
    }
}
