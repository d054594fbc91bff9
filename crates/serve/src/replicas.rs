//! The base on each GPU, with an engine of its own, and which of them writes a request's texts.

use crate::options::Options;
use metal_candle::Result;
use metal_candle::engine::{EngineOptions, Handle, Statistics};
use metal_candle::model::Model;
use metal_candle::text::Tokenizer;
use metal_candle::turns::Turns;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The base on a device.
pub struct Replica {
    /// Its number, from 0. Jobs train on the first.
    pub index: usize,
    /// The frozen base.
    pub model: Arc<Model>,
    /// What writes texts.
    pub engine: Handle,
    /// Whose turn it is on the device: what computes outside of the engine holds one.
    pub turns: Arc<Turns>,
    /// The tokens that its cache has room for.
    pub cache_tokens: usize,
    /// What is asked of it, by the number of texts.
    asked: AtomicUsize,
}

impl Replica {
    fn start(
        index: usize,
        model: &Arc<Model>,
        tokenizer: &Arc<Tokenizer>,
        options: &Options,
    ) -> Result<Arc<Self>> {
        let turns = Turns::new(options.training_share);
        let engine = EngineOptions { turns: Some(turns.clone()), ..options.engine.clone() };
        let engine = Handle::start(model, Some(tokenizer.clone()), engine)?;
        let cache_tokens = engine.statistics()?.blocks * options.engine.block_size;
        let (model, asked) = (model.clone(), AtomicUsize::new(0));
        Ok(Arc::new(Self { index, model, engine, turns, cache_tokens, asked }))
    }
}

/// The base on all devices.
pub struct Replicas {
    /// Where jobs train, and all else is computed that isn't a text.
    pub first: Arc<Replica>,
    others: Vec<Arc<Replica>>,
}

impl Replicas {
    /// Starts an engine for each of these models, which are one base on different devices.
    ///
    /// # Errors
    /// When there is no memory for a cache.
    pub fn start(
        first: &Arc<Model>,
        others: &[Arc<Model>],
        tokenizer: &Arc<Tokenizer>,
        options: &Options,
    ) -> Result<Self> {
        let start = |index, model| Replica::start(index, model, tokenizer, options);
        let first = start(0, first)?;
        let others = (1..).zip(others).map(|(index, model)| start(index, model));
        Ok(Self { first, others: others.collect::<Result<_>>()? })
    }

    fn iter(&self) -> impl Iterator<Item = &Arc<Replica>> {
        std::iter::once(&self.first).chain(&self.others)
    }

    /// A place where there is the least to do, which a request keeps, as its texts may share a beginning. Of equals it is
    /// the last one, as jobs train on the first.
    pub fn place(&self) -> Arc<Place> {
        let mut least = &self.first;
        for replica in &self.others {
            if replica.asked.load(Ordering::Relaxed) <= least.asked.load(Ordering::Relaxed) {
                least = replica;
            }
        }
        Place::new(least.clone())
    }

    /// A place at the first one.
    pub fn place_on_first(&self) -> Arc<Place> {
        Place::new(self.first.clone())
    }

    /// The tokens that every cache has room for.
    pub fn cache_tokens(&self) -> usize {
        self.iter().map(|replica| replica.cache_tokens).min().unwrap_or_default()
    }

    /// Whether all engines' threads live.
    pub fn are_alive(&self) -> bool {
        self.iter().all(|replica| replica.engine.is_alive())
    }

    /// What all engines do together. Those that are busy with a step for longer than `patience` say what they did when it
    /// began.
    ///
    /// # Errors
    /// When one is gone.
    pub fn statistics(&self, patience: Duration) -> Result<Statistics> {
        let deadline = Instant::now() + patience;
        let mut sum = Statistics::default();
        for replica in self.iter() {
            let left = deadline.saturating_duration_since(Instant::now());
            let Statistics {
                waiting,
                running,
                blocks,
                available_blocks,
                cache_bytes,
                preemptions,
                drafted,
                accepted,
                recorded,
                read_ahead,
            } = replica.engine.statistics_within(left)?;
            sum.waiting += waiting;
            sum.running += running;
            sum.blocks += blocks;
            sum.available_blocks += available_blocks;
            sum.cache_bytes += cache_bytes;
            sum.preemptions += preemptions;
            sum.drafted += drafted;
            sum.accepted += accepted;
            sum.recorded += recorded;
            sum.read_ahead += read_ahead;
        }
        Ok(sum)
    }
}

/// A request's place at a replica, which counts as busier until it is dropped.
pub struct Place {
    /// Where it is.
    pub replica: Arc<Replica>,
    texts: AtomicUsize,
}

impl Place {
    fn new(replica: Arc<Replica>) -> Arc<Self> {
        let place = Self { replica, texts: AtomicUsize::new(0) };
        place.add(1);
        Arc::new(place)
    }

    /// Says how many texts the request has beyond the first.
    pub fn add(&self, texts: usize) {
        self.texts.fetch_add(texts, Ordering::Relaxed);
        self.replica.asked.fetch_add(texts, Ordering::Relaxed);
    }
}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Place").field("replica", &self.replica.index).finish()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.replica.asked.fetch_sub(*self.texts.get_mut(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use metal_candle::{DType, Device};
    use std::path::Path;

    #[test]
    fn a_request_goes_where_least_is_asked() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../cli/demo/base");
        let model = Arc::new(Model::load(&folder, DType::F32, &Device::Cpu).unwrap());
        let tokenizer = Arc::new(Tokenizer::load(&folder).unwrap());
        let mut options = Options::new("demo", "");
        options.engine.cache_tokens = Some(256);
        let others = [model.clone(), model.clone()];
        let replicas = Replicas::start(&model, &others, &tokenizer, &options).unwrap();
        assert_eq!(replicas.cache_tokens(), 256);
        let blocks = 256 / options.engine.block_size;
        assert_eq!(replicas.statistics(Duration::from_secs(1)).unwrap().blocks, 3 * blocks);
        assert!(replicas.are_alive());

        let index = |place: &Arc<Place>| place.replica.index;
        let last = replicas.place();
        let middle = replicas.place();
        let first = replicas.place();
        assert_eq!([&last, &middle, &first].map(index), [2, 1, 0]);
        last.add(5);
        first.add(1);
        drop(middle);
        let places: Vec<_> = (0..3).map(|_| replicas.place()).collect();
        assert_eq!(places.iter().map(index).collect::<Vec<_>>(), [1, 1, 1]);
        drop(last);
        assert_eq!(index(&replicas.place()), 2);
        drop((first, places));
        assert!(replicas.iter().all(|replica| replica.asked.load(Ordering::Relaxed) == 0));
    }
}
