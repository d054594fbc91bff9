//! A reader over the parts that tensor-parallel ranks have of a model: the first computes on the engine's thread, the
//! others on threads of their own, all of them the same passes.

use super::reader::Reader;
use crate::adapter::{Adapter, AdapterVersion};
use crate::model::Model;
use crate::pass::{ModelReader, PagedCache, Stretch};
use crate::{Error, Result};
use candle_core::Tensor;
use std::collections::HashMap;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};

/// Reads with all ranks. Once one has failed, the others can't go on without it, and what is asked later fails, too.
pub(super) struct RankReader {
    model: Arc<Model>,
    first: Rank,
    others: Vec<Other>,
    /// The adapters that all ranks have their parts of, by number.
    adapters: Vec<(AdapterVersion, u64)>,
    numbers: u64,
    failure: Failure,
}

/// Which rank has failed first, and how.
type Failure = Arc<Mutex<Option<(usize, String)>>>;

/// A rank, with its parts of adapters by number.
struct Rank {
    index: usize,
    reader: ModelReader,
    adapters: HashMap<u64, Arc<Adapter>>,
    failure: Failure,
}

/// A rank on a thread of its own, which lives as long as orders may come.
struct Other {
    orders: Sender<Order>,
    done: Receiver<Result<()>>,
}

#[derive(Clone)]
enum Order {
    /// Keep your parts of these adapters.
    Keep(Arc<Vec<(u64, Arc<Adapter>)>>),
    Forget(Arc<Vec<u64>>),
    Read(Arc<Pass>),
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
        let failure = Failure::default();
        let mut ranks = model.ranks().iter().enumerate().map(|(index, part)| {
            let (part, cache, failure) = (part.clone(), cache.clone(), failure.clone());
            move || {
                let reader = ModelReader::new(&part, cache(&part)?);
                Ok(Rank { index, reader, adapters: HashMap::new(), failure })
            }
        });
        let missing = || Error::option("tensor_parallel", "is 0, expected at least 1");
        let first = ranks.next().ok_or_else(missing)?()?;
        let others = ranks.map(Other::start).collect::<Result<Vec<_>>>()?;
        for other in &others {
            other.wait()?;
        }
        let (model, adapters) = (model.clone(), Vec::new());
        Ok(Self { model, first, others, adapters, numbers: 0, failure })
    }

    /// Gives the other ranks an order, follows it with `f`, and waits until all have done so. What the first of those has
    /// to say that failed is the error.
    fn all<T>(&mut self, order: &Order, f: impl FnOnce(&mut Rank) -> Result<T>) -> Result<T> {
        for other in &self.others {
            // One that is gone doesn't answer either.
            let _ = other.orders.send(order.clone());
        }
        let mine = f(&mut self.first);
        let others: Vec<_> = self.others.iter().map(Other::wait).collect();
        others.into_iter().collect::<Result<()>>().and(mine)
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

    /// The error of a rank, once one has failed.
    fn check(&self) -> Result<()> {
        match self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone() {
            None => Ok(()),
            Some((rank, message)) => Err(Error::Rank { rank, message }),
        }
    }
}

impl Reader for RankReader {
    fn read(&mut self, stretches: &[Stretch], total: usize) -> Result<Tensor> {
        self.check()?;
        self.bring_adapters(stretches)?;
        let pieces = stretches.iter().map(|stretch| self.piece(stretch));
        let pass = Arc::new(Pass { stretches: pieces.collect::<Result<_>>()?, total });
        let read = self.all(&Order::Read(pass.clone()), |rank| rank.read(&pass));
        self.check()?;
        read
    }

    fn ropes_change(&self, a: usize, b: usize) -> bool {
        self.model.ropes_change(a, b)
    }

    fn check(&self, adapter: &Adapter) -> Result<()> {
        adapter.check(&self.model)
    }

    fn recorded(&self) -> u64 {
        self.first.reader.recorded()
    }

    fn vocabulary(&self) -> usize {
        self.model.config().vocab_size
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

    /// What follows the pass's tokens. If it can't be computed, nobody waits for this rank any more.
    fn read(&mut self, pass: &Pass) -> Result<Tensor> {
        let Self { index, reader, adapters, failure } = self;
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
        let read = reader.read(&stretches, pass.total);
        if let Err(error) = &read {
            let mut failure = failure.lock().unwrap_or_else(PoisonError::into_inner);
            // Those that come later say that this one is missing.
            failure.get_or_insert_with(|| (*index, format!("{error}; start again")));
            drop(failure);
            if let Some(rank) = &reader.model().rank {
                rank.sums.end();
            }
        }
        read
    }

    fn follow(&mut self, order: &Order) -> Result<()> {
        match order {
            Order::Keep(adapters) => self.keep(adapters),
            Order::Forget(numbers) => {
                self.forget(numbers);
                Ok(())
            }
            Order::Read(pass) => self.read(pass).map(drop),
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
                let Ok(order) = coming.recv() else { return };
                so_far = rank.follow(&order);
            }
        };
        std::thread::Builder::new()
            .name("rank".into())
            .spawn(work)
            .map_err(|error| Error::option("engine", format!("no thread for it: {error}")))?;
        Ok(Self { orders, done })
    }

    /// Waits until it has followed an order.
    fn wait(&self) -> Result<()> {
        let gone = || Error::option("engine", "the thread of a rank has ended");
        self.done.recv().unwrap_or_else(|_| Err(gone()))
    }
}
