//! One file a command.

pub mod bench;
pub mod chat;
pub mod completions;
pub mod convert;
pub mod data;
pub mod demo;
pub mod evaluate;
pub mod fuse;
pub mod generate;
pub mod inspect;
pub mod jobs;
pub mod keys;
pub mod logprobs;
pub mod serve;
pub mod train;
