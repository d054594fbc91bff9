//! A reader over the parts that tensor-parallel ranks have of a model: the first computes on the engine's thread, the
//! others on threads of their own, all of them the same passes.

use super::reader::Reader;
use crate::adapter::{Adapter, AdapterVersion};
use crate::foreign::contained;
use crate::model::{Model, Sums};
use crate::pass::{ModelReader, PagedCache, Stretch};
use crate::{Error, Result};
use candle_core::Tensor;
use metal_candle_kernels::devices::Mark;
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often a device is looked at.
const GLANCE: Duration = Duration::from_millis(1);
/// How long the passes before one that has failed may take.
const LIMIT: Duration = Duration::from_secs(60);
/// How long a host may be held up by its device, which waits for a rank that has failed.
const GRACE: Duration = Duration::from_secs(10);

/// Reads with all ranks. Where one fails, so does the pass for all, and the next one begins with finding each other anew.
pub(super) struct RankReader {
    first: Rank,
    others: Vec<Other>,
    /// The adapters that all ranks have their parts of, by number.
    adapters: Vec<(AdapterVersion, u64)>,
    numbers: u64,
    failure: Failure,
    /// Why they can't go on any more, if that is so.
    lost: Option<String>,
    /// Given back once all ranks are done.
    model: Taken,
}

/// A model whose ranks nobody else computes with.
struct Taken(Arc<Model>);

impl Drop for Taken {
    fn drop(&mut self) {
        self.0.ranks_are_taken.store(false, Ordering::Release);
    }
}

impl Drop for RankReader {
    /// Who comes next finds ranks that can add up, if that is possible.
    fn drop(&mut self) {
        let _ = self.begin_anew();
    }
}

/// Which rank has failed first, and how.
type Failure = Arc<Mutex<Option<(usize, String)>>>;

/// A rank, with its parts of adapters by number.
struct Rank {
    index: usize,
    reader: ModelReader,
    adapters: HashMap<u64, Arc<Adapter>>,
    failure: Failure,
    /// Before its last pass, and behind it.
    before: Option<Mark>,
    behind: Option<Mark>,
    /// Whether that has failed.
    has_failed: bool,
}

/// A rank on a thread of its own.
struct Other {
    orders: Sender<Order>,
    done: Receiver<Result<()>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Clone)]
enum Order {
    /// Keep your parts of these adapters.
    Keep(Arc<Vec<(u64, Arc<Adapter>)>>),
    Forget(Arc<Vec<u64>>),
    Read(Arc<Pass>),
    /// After one has failed: wait until the device is done with the passes before that.
    Settle,
    /// And then begin to add up anew.
    BeginAnew,
    /// There is nothing more to do.
    End,
}

/// What a pass reads.
struct Pass {
    stretches: Vec<Piece>,
    total: usize,
}

/// A [`Stretch`] that its text may go on without.
struct Piece {
    tokens: Vec<u32>,
    start: usize,
    tables: Vec<Vec<u32>>,
    adapter: Option<u64>,
    logits: usize,
}

impl RankReader {
    /// With a cache for each rank, as `cache` makes it.
    pub fn new(
        model: &Arc<Model>,
        cache: impl Fn(&Model) -> Result<PagedCache> + Clone + Send + 'static,
    ) -> Result<Self> {
        if model.ranks_are_taken.swap(true, Ordering::AcqRel) {
            let problem = "is computed by another engine, of which there may be one at a time";
            return Err(Error::option("tensor_parallel", problem));
        }
        let taken = Taken(model.clone());
        let failure = Failure::default();
        let mut ranks = model.ranks().iter().enumerate().map(|(index, part)| {
            let (part, cache, failure) = (part.clone(), cache.clone(), failure.clone());
            move || {
                let reader = ModelReader::new(&part, cache(&part)?)?;
                let (adapters, before, behind) = (HashMap::new(), None, None);
                Ok(Rank { index, reader, adapters, failure, before, behind, has_failed: false })
            }
        });
        let missing = || Error::option("tensor_parallel", "is 0, expected at least 1");
        let first = ranks.next().ok_or_else(missing)?()?;
        let others = ranks.map(Other::start).collect::<Result<Vec<_>>>()?;
        for other in &others {
            other.wait()?;
        }
        let adapters = Vec::new();
        let lost = None;
        Ok(Self { first, others, adapters, numbers: 0, failure, lost, model: taken })
    }

    /// Gives the other ranks an order, follows it with `f`, and waits until all have done so. What the first of those has
    /// to say that failed is the error.
    fn all<T>(&mut self, order: &Order, f: impl FnOnce(&mut Rank) -> Result<T>) -> Result<T> {
        for other in &self.others {
            other.orders.send(order.clone()).map_err(|_| gone())?;
        }
        let mine = contained(|| f(&mut self.first)).unwrap_or_else(|panic| Err(panicked(panic)));
        let others: Vec<_> = self.others.iter().map(|other| self.answer(other)).collect();
        others.into_iter().collect::<Result<()>>().and(mine)
    }

    /// What a rank says that follows an order.
    fn answer(&self, other: &Other) -> Result<()> {
        loop {
            match other.done.recv_timeout(GRACE) {
                Ok(said) => return said,
                Err(RecvTimeoutError::Disconnected) => return Err(gone()),
                Err(RecvTimeoutError::Timeout) if self.failed().is_some() => {
                    self.first.abort_sums()
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Brings the adapters of the stretches to all ranks, and gives back the memory of those that are gone.
    fn bring_adapters(&mut self, stretches: &[Stretch]) -> Result<()> {
        let (here, gone): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.adapters).into_iter().partition(|(it, _)| it.is_current());
        self.adapters = here;
        if !gone.is_empty() {
            self.forget(gone.iter().map(|(_, number)| *number).collect())?;
        }
        let mut new: Vec<(u64, Arc<Adapter>)> = Vec::new();
        for adapter in stretches.iter().filter_map(|stretch| stretch.adapter) {
            let is_known = self.number_of(adapter).is_some();
            if !is_known && !new.iter().any(|(_, other)| Arc::ptr_eq(other, adapter)) {
                self.numbers += 1;
                new.push((self.numbers, adapter.clone()));
            }
        }
        if new.is_empty() {
            return Ok(());
        }
        let new = Arc::new(new);
        let kept = self.all(&Order::Keep(new.clone()), |rank| rank.keep(&new));
        if let Err(error) = kept {
            self.forget(new.iter().map(|(number, _)| *number).collect())?;
            return Err(error);
        }
        let versions = new.iter().map(|(number, adapter)| (AdapterVersion::of(adapter), *number));
        self.adapters.extend(versions);
        Ok(())
    }

    fn forget(&mut self, numbers: Vec<u64>) -> Result<()> {
        let numbers = Arc::new(numbers);
        self.all(&Order::Forget(numbers.clone()), |rank| {
            rank.forget(&numbers);
            Ok(())
        })
    }

    fn number_of(&self, adapter: &Arc<Adapter>) -> Option<u64> {
        let version = AdapterVersion::of(adapter);
        let known = self.adapters.iter().find(|(other, _)| *other == version);
        known.map(|(_, number)| *number)
    }

    fn piece(&self, stretch: &Stretch) -> Result<Piece> {
        let lost = || Error::option("adapters", "have changed while they are used");
        let number = |adapter| self.number_of(adapter).ok_or_else(lost);
        Ok(Piece {
            tokens: stretch.tokens.to_vec(),
            start: stretch.start,
            tables: stretch.tables.to_vec(),
            adapter: stretch.adapter.map(number).transpose()?,
            logits: stretch.logits,
        })
    }

    /// The error of a rank, if one has failed.
    fn failed(&self) -> Option<Error> {
        let failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        failure.clone().map(|(rank, message)| Error::Rank { rank, message })
    }

    /// Goes on after a rank has failed. Where that was for lack of memory, recordings may have taken it.
    fn begin_anew(&mut self) -> Result<()> {
        let lost = |why: &String| Err(Error::option("tensor_parallel", why));
        self.lost.as_ref().map_or(Ok(()), lost)?;
        let Some(failed) = self.failed() else { return Ok(()) };
        let why = |error| format!("the ranks can't begin anew after `{failed}`: {error}");
        if let Err(error) = self.all(&Order::Settle, Rank::settle) {
            return lost(self.lost.insert(format!("{}; start again", why(error))));
        }
        let begun = self.all(&Order::BeginAnew, Rank::begin_anew);
        begun.map_err(|error| Error::option("tensor_parallel", why(error)))?;
        tracing::warn!("{failed}; the ranks have begun anew, and record no passes any more");
        *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = None;
        Ok(())
    }
}

impl Reader for RankReader {
    fn read(&mut self, stretches: &[Stretch], total: usize) -> Result<Tensor> {
        self.begin_anew()?;
        self.bring_adapters(stretches)?;
        let pieces = stretches.iter().map(|stretch| self.piece(stretch));
        let pass = Arc::new(Pass { stretches: pieces.collect::<Result<_>>()?, total });
        let read = self.all(&Order::Read(pass.clone()), |rank| rank.read(&pass));
        self.failed().map_or(read, Err)
    }

    fn ropes_change(&self, a: usize, b: usize) -> bool {
        self.model.0.ropes_change(a, b)
    }

    fn check(&self, adapter: &Adapter) -> Result<()> {
        adapter.check(&self.model.0)?;
        match adapter.is_updates_alone() {
            true => Ok(()),
            false => Err(Error::Unsupported(
                "an adapter that is more than LoRA of linear layers for a model in parts on several devices".into(),
            )),
        }
    }

    fn confirm(&self) -> Result<()> {
        self.failed().map_or(Ok(()), Err)
    }

    fn recorded(&self) -> u64 {
        self.first.reader.recorded()
    }

    fn vocabulary(&self) -> usize {
        self.model.0.config().vocab_size
    }
}

impl Rank {
    fn keep(&mut self, adapters: &[(u64, Arc<Adapter>)]) -> Result<()> {
        for (number, adapter) in adapters {
            let part = adapter.part_for(self.reader.model())?;
            self.adapters.insert(*number, Arc::new(part));
        }
        Ok(())
    }

    fn forget(&mut self, numbers: &[u64]) {
        for number in numbers {
            self.adapters.remove(number);
        }
    }

    /// What follows the pass's tokens. If it can't be computed, no host waits for this rank any more.
    fn read(&mut self, pass: &Pass) -> Result<Tensor> {
        let Self { reader, adapters, .. } = self;
        let stretches: Vec<_> = pass
            .stretches
            .iter()
            .map(|piece| Stretch {
                tokens: &piece.tokens,
                start: piece.start,
                tables: &piece.tables,
                adapter: piece.adapter.and_then(|number| adapters.get(&number)),
                logits: piece.logits,
            })
            .collect();
        let device = reader.model().device().clone();
        let read = contained(|| {
            self.before = Some(Mark::new(&device)?);
            let logits = reader.read(&stretches, pass.total)?;
            self.behind = Some(Mark::new(&device)?);
            Ok(logits)
        });
        let read = read.unwrap_or_else(|panic| Err(panicked(panic)));
        if let Err(error) = &read {
            self.has_failed = true;
            self.fail(error.to_string());
            if let Some(sums) = sums_of(&self.reader) {
                sums.end();
            }
        }
        read
    }

    /// Says why this rank has failed, if it is the first: others fail as this one is missing.
    fn fail(&self, why: String) {
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        failure.get_or_insert((self.index, why));
    }

    /// As [`Self::fail`], where the device has stopped within a pass that others' devices wait for.
    fn abort(&self, why: String) {
        self.fail(why);
        self.abort_sums();
    }

    fn abort_sums(&self) {
        if let Some(sums) = sums_of(&self.reader) {
            sums.abort();
        }
    }

    /// The next order. Until it comes, this looks how the device gets on with the last pass, as others' wait for it.
    fn next(&mut self, coming: &Receiver<Order>) -> Option<Order> {
        while let Some(behind) = &self.behind {
            match coming.recv_timeout(GLANCE) {
                Ok(order) => return Some(order),
                Err(RecvTimeoutError::Disconnected) => return None,
                Err(RecvTimeoutError::Timeout) => {}
            }
            match behind.is_done() {
                Ok(false) => {}
                Ok(true) => self.behind = None,
                Err(error) => {
                    self.behind = None;
                    self.abort(error.to_string());
                }
            }
        }
        if self.has_failed {
            match coming.recv_timeout(GRACE) {
                Err(RecvTimeoutError::Timeout) => self.abort_sums(),
                order => return order.ok(),
            }
        }
        coming.recv().ok()
    }

    /// Waits until the device is done with the passes before one that has failed; if it can't be, the others needn't wait
    /// for it.
    fn settle(&mut self) -> Result<()> {
        let settled = self.wait_for_before();
        if settled.is_err() {
            self.abort_sums();
        }
        settled
    }

    fn wait_for_before(&mut self) -> Result<()> {
        let begun = Instant::now();
        while let Some(before) = &self.before {
            if before.is_done()? {
                self.before = None;
            } else if begun.elapsed() > LIMIT {
                let problem =
                    format!("the device has not done its work within {} s", LIMIT.as_secs());
                return Err(Error::option("device", problem));
            } else {
                std::thread::sleep(GLANCE);
            }
        }
        Ok(())
    }

    fn begin_anew(&mut self) -> Result<()> {
        (self.behind, self.has_failed) = (None, false);
        self.reader.stop_recording();
        sums_of(&self.reader).map_or(Ok(()), |sums| sums.begin_anew())
    }

    fn follow(&mut self, order: &Order) -> Result<()> {
        match order {
            Order::Keep(adapters) => self.keep(adapters),
            Order::Forget(numbers) => {
                self.forget(numbers);
                Ok(())
            }
            Order::Read(pass) => self.read(pass).map(drop),
            Order::Settle => self.settle(),
            Order::BeginAnew => self.begin_anew(),
            // Nobody follows it.
            Order::End => Ok(()),
        }
    }
}

impl Other {
    /// With its memory on the thread's device; the first that it has to say is whether it has it.
    fn start(make: impl FnOnce() -> Result<Rank> + Send + 'static) -> Result<Self> {
        let (orders, coming) = mpsc::channel::<Order>();
        let (says, done) = mpsc::channel();
        let work = move || {
            let mut rank = match make() {
                Ok(rank) => rank,
                Err(error) => return drop(says.send(Err(error))),
            };
            let mut so_far = Ok(());
            while says.send(std::mem::replace(&mut so_far, Ok(()))).is_ok() {
                so_far = match rank.next(&coming) {
                    None | Some(Order::End) => return,
                    Some(order) => contained(|| rank.follow(&order))
                        .unwrap_or_else(|panic| Err(panicked(panic))),
                };
            }
        };
        let thread = std::thread::Builder::new()
            .name("rank".into())
            .spawn(work)
            .map_err(|error| Error::option("engine", format!("no thread for it: {error}")))?;
        Ok(Self { orders, done, thread: Some(thread) })
    }

    /// Waits until it has followed an order.
    fn wait(&self) -> Result<()> {
        self.done.recv().unwrap_or_else(|_| Err(gone()))
    }
}

impl Drop for Other {
    /// What it has taken of its device's memory is free then.
    fn drop(&mut self) {
        let _ = self.orders.send(Order::End);
        if let Some(thread) = self.thread.take() {
            // A panic was told when it was waited for.
            let _ = thread.join();
        }
    }
}

fn panicked(panic: String) -> Error {
    Error::option("engine", format!("a rank has panicked: {panic}"))
}

fn gone() -> Error {
    Error::option("engine", "the thread of a rank has ended")
}

fn sums_of(reader: &ModelReader) -> Option<Arc<dyn Sums>> {
    reader.model().rank.as_ref().map(|rank| rank.sums.clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adapter::LoraConfig;
    use crate::model::{Config, Holding};
    use crate::parallel::tensor;
    use crate::pass::{CacheDtype, Layers};
    use candle_core::{DType, Device};
    use serde_json::json;

    /// Two ranks of a small model.
    fn split() -> Arc<Model> {
        let config = json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 32,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 30,
            "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
        });
        let config = Config::from_json(&config.to_string()).unwrap();
        let made = tensor::build(&[Device::Cpu, Device::Cpu], |device, placement| {
            let holding = Holding { quantization: None, placement };
            Model::from_fn_with(config.clone(), DType::F32, device, holding, |_, shape| {
                Ok(Tensor::ones(shape, DType::F32, &Device::Cpu)?)
            })
        });
        Arc::new(made.unwrap())
    }

    fn reader(model: &Arc<Model>) -> Result<RankReader> {
        let kinds = [Layers { window: None, blocks: 4 }];
        RankReader::new(model, move |part| PagedCache::new(part, &kinds, 8, CacheDtype::Model))
    }

    fn read(reader: &mut RankReader, adapter: Option<&Arc<Adapter>>) -> Result<Tensor> {
        let (tokens, tables) = ([1, 2, 3], [vec![0]]);
        let stretch = Stretch { tokens: &tokens, start: 0, tables: &tables, adapter, logits: 1 };
        Reader::read(reader, &[stretch], 3)
    }

    #[test]
    fn ranks_keep_their_parts_of_adapters_as_long_as_these_are_there() {
        let model = split();
        let mut reader = reader(&model).unwrap();
        let config = LoraConfig { rank: 2, ..LoraConfig::default() };
        let make = |seed| Arc::new(Adapter::new(&model, &config, seed).unwrap());
        let (first, second) = (make(1), make(2));
        for adapter in [&first, &second, &first] {
            read(&mut reader, Some(adapter)).unwrap();
        }
        assert_eq!((reader.adapters.len(), reader.first.adapters.len()), (2, 2));
        let part = Arc::downgrade(&reader.first.adapters[&1]);
        drop(first);
        read(&mut reader, Some(&second)).unwrap();
        assert_eq!((reader.adapters.len(), reader.first.adapters.len()), (1, 1));
        assert!(part.upgrade().is_none());
        // One that has changed is another.
        second.parameters().changed();
        read(&mut reader, Some(&second)).unwrap();
        assert_eq!(reader.first.adapters.keys().collect::<Vec<_>>(), [&3]);
    }

    #[test]
    fn a_model_is_computed_by_one_at_a_time_and_after_a_failure_by_all_again() {
        let model = split();
        let mut one = reader(&model).unwrap();
        assert!(reader(&model).err().unwrap().to_string().contains("another engine"));
        let logits = read(&mut one, None).unwrap().to_vec2::<f32>().unwrap();
        assert_eq!((logits.len(), logits[0].len()), (1, 30));
        one.first.abort("no memory".into());
        let failed = Reader::confirm(&one).unwrap_err().to_string();
        assert_eq!(failed, "rank 0: no memory");
        assert_eq!(read(&mut one, None).unwrap().to_vec2::<f32>().unwrap(), logits);
        // Who comes next begins anew, too.
        one.first.abort("no memory".into());
        drop(one);
        let mut one = reader(&model).unwrap();
        assert_eq!(read(&mut one, None).unwrap().to_vec2::<f32>().unwrap(), logits);
    }

    #[test]
    fn a_panic_of_another_rank_is_its_failure() {
        let model = split();
        let mut reader = reader(&model).unwrap();
        let logits = read(&mut reader, None).unwrap().to_vec2::<f32>().unwrap();
        // The end of this overflows.
        let tables = vec![vec![0]];
        let piece = Piece { tokens: vec![1], start: usize::MAX, tables, adapter: None, logits: 1 };
        let pass = Arc::new(Pass { stretches: vec![piece], total: 1 });
        assert!(reader.all(&Order::Read(pass), |_| Ok(())).is_err());
        let failed = Reader::confirm(&reader).unwrap_err().to_string();
        assert!(failed.starts_with("rank 1: "), "{failed}");
        assert_eq!(read(&mut reader, None).unwrap().to_vec2::<f32>().unwrap(), logits);
    }
}
