//! The command as a person or a script uses it.

mod batch;
mod bench;
mod check;
mod commands;
mod common;
mod control_characters;
mod data;
mod distillation;
mod documents;
mod preferences;
mod runs;
#[cfg(unix)]
mod serving;
mod settings;
mod terminal;
