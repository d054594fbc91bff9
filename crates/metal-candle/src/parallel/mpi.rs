//! Ranks that talk over MPI, on CPUs.
//!
//! MPI's own all-reduce may add in any order, which its standard only recommends to be fixed. So only messages are MPI's
//! here: each rank adds up its part of the buffer, in the order of ranks, and sends the sum to the others, which moves
//! as many bytes as a ring does. Messages don't block; whoever waits looks at them until the limit, so a lost rank is an
//! error that names it.

use super::launcher::Launched;
use super::member::Part;
use super::{Collectives, Pause, elsewhere, place};
use crate::{Error, Result};
use ::mpi::environment::{Threading, Universe, initialize_with_threading, processor_name};
use ::mpi::ffi;
use ::mpi::raw::AsRaw;
use ::mpi::topology::SimpleCommunicator;
use ::mpi::traits::{Communicator, Equivalence};
use candle_core::{DType, Device, Tensor};
use std::cell::RefCell;
use std::ops::Range;
use std::os::raw::c_int;
use std::rc::Rc;
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

/// Elements that are added up at a time, which bounds the memory for messages.
const PIECE: usize = 16 << 20;
/// The tag of all messages but those below: those between two ranks arrive in order.
const TAG: c_int = 1;
/// The tag of messages without content by which rank 0 says that it is busy.
const BUSY: c_int = 2;

/// This process among those that MPI knows.
pub(super) struct Mpi {
    world: SimpleCommunicator,
    /// Until the group is left.
    universe: RefCell<Option<Universe>>,
    /// The one that has joined, which alone may ask MPI for anything.
    thread: ThreadId,
    rank: usize,
    size: usize,
    limit: Duration,
    /// The machines of the ranks.
    hosts: Vec<String>,
}

// SAFETY: what isn't `Sync`, MPI's communicator and the universe, is reached by the thread that has joined alone: see
// `require_own_thread` and `abort`.
unsafe impl Sync for Mpi {}

impl std::fmt::Debug for Mpi {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mpi").field("rank", &self.rank).field("size", &self.size).finish()
    }
}

impl Mpi {
    /// Joins the processes that were started with this one.
    pub fn join(launched: &Launched, limit: Duration) -> Result<Self> {
        let Some((universe, _)) = initialize_with_threading(Threading::Funneled) else {
            return Err(Error::Unsupported("MPI was started by this process before".into()));
        };
        let world = universe.world();
        // SAFETY: both are MPI's own, which is initialised. Errors come back instead of ending the process.
        unsafe { ffi::MPI_Comm_set_errhandler(world.as_raw(), ffi::RSMPI_ERRORS_RETURN) };
        let (rank, size) = (world.rank() as usize, world.size() as usize);
        if size != launched.size {
            return Err(Error::Unsupported(format!(
                "the launcher has started {} processes, and MPI knows of {size}: start them with the mpirun of the MPI \
                 that this program was built with, or with srun --mpi=pmix",
                launched.size
            )));
        }
        let mut mpi = Self {
            world,
            universe: RefCell::new(Some(universe)),
            thread: thread::current().id(),
            rank,
            size,
            limit,
            hosts: Vec::new(),
        };
        let host = processor_name().unwrap_or_default();
        let hosts = mpi.gather("the start", host.as_bytes())?;
        mpi.hosts = hosts.iter().map(|host| String::from_utf8_lossy(host).into_owned()).collect();
        Ok(mpi)
    }

    /// An error on another thread than the one that has joined.
    fn require_own_thread(&self) -> Result<()> {
        if thread::current().id() == self.thread {
            return Ok(());
        }
        Err(Error::Unsupported(
            "MPI on another thread than the one that has joined the group; train on that one"
                .into(),
        ))
    }

    /// Whether this thread may ask MPI for anything, which it may until the group is left.
    fn may_ask(&self) -> bool {
        self.require_own_thread().is_ok() && self.universe.borrow().is_some()
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let rank = self.rank;
        (0..self.size).filter(move |other| *other != rank)
    }

    fn send<T: Equivalence>(
        &self,
        to: usize,
        buffer: &Rc<Vec<T>>,
        range: Range<usize>,
    ) -> Result<Transfer<T>> {
        let part = buffer.get(range).ok_or_else(|| elsewhere(to, "a message"))?;
        let mut request = null();
        // SAFETY: MPI reads `part`, which the transfer keeps alive, or leaks, until MPI is done with it.
        let code = unsafe {
            ffi::MPI_Isend(
                part.as_ptr().cast(),
                length(part)?,
                T::equivalent_datatype().as_raw(),
                to as c_int,
                TAG,
                self.world.as_raw(),
                &mut request,
            )
        };
        self.check(to, code)?;
        Ok(Transfer {
            rank: to,
            request,
            done: false,
            sent: Some(buffer.clone()),
            received: Vec::new(),
        })
    }

    fn receive<T: Equivalence + Clone + Default>(
        &self,
        from: usize,
        count: usize,
    ) -> Result<Transfer<T>> {
        let mut received = vec![T::default(); count];
        let mut request = null();
        // SAFETY: MPI writes to `received`, which the transfer keeps where it is, or leaks, until MPI is done with it.
        let code = unsafe {
            ffi::MPI_Irecv(
                received.as_mut_ptr().cast(),
                length(&received)?,
                T::equivalent_datatype().as_raw(),
                from as c_int,
                TAG,
                self.world.as_raw(),
                &mut request,
            )
        };
        self.check(from, code)?;
        Ok(Transfer { rank: from, request, done: false, sent: None, received })
    }

    /// Waits for all of them, but no longer than the limit.
    fn wait<T>(&self, what: &str, transfers: &mut [Transfer<T>]) -> Result<()> {
        let mut begun = Instant::now();
        let mut pause = Pause::new();
        loop {
            let mut late = None;
            for transfer in transfers.iter_mut().filter(|transfer| !transfer.done) {
                let code = transfer.test();
                self.check(transfer.rank, code)?;
                if !transfer.done {
                    late = late.or(Some(transfer.rank));
                }
            }
            if self.hears_busy()? {
                begun = Instant::now();
            }
            let Some(rank) = late else { return Ok(()) };
            let waited = begun.elapsed();
            if waited > self.limit {
                return Err(Error::Rank {
                    rank,
                    message: format!(
                        "{}didn't take part in {what} within {} s; it is lost, or slower than this limit allows",
                        self.on(rank),
                        self.limit.as_secs_f64()
                    ),
                });
            }
            pause.rest();
        }
    }

    /// Whether rank 0 has said that it is busy; takes all that it has said of it.
    fn hears_busy(&self) -> Result<bool> {
        if self.rank == 0 {
            return Ok(false);
        }
        let mut heard = false;
        loop {
            let mut is_there = 0;
            let world = self.world.as_raw();
            // SAFETY: the communicator is MPI's, and MPI writes to the flag alone.
            let code =
                unsafe { ffi::MPI_Iprobe(0, BUSY, world, &mut is_there, ffi::RSMPI_STATUS_IGNORE) };
            self.check(0, code)?;
            if is_there == 0 {
                return Ok(heard);
            }
            let kind = u8::equivalent_datatype();
            // SAFETY: as above; the message is there and has no content, so nothing is written and nothing waits.
            let code = unsafe {
                ffi::MPI_Recv(
                    std::ptr::null_mut(),
                    0,
                    kind.as_raw(),
                    0,
                    BUSY,
                    world,
                    ffi::RSMPI_STATUS_IGNORE,
                )
            };
            self.check(0, code)?;
            heard = true;
        }
    }

    /// Sends the same to all others, and takes what they send: so many elements of each.
    fn exchange<T: Equivalence + Clone + Default>(
        &self,
        what: &str,
        mine: Vec<T>,
        lengths: impl Fn(usize) -> usize,
    ) -> Result<Vec<Vec<T>>> {
        self.require_own_thread()?;
        let mine = Rc::new(mine);
        let mut transfers = Vec::with_capacity(2 * self.size);
        for other in self.others() {
            transfers.push(self.receive(other, lengths(other))?);
        }
        for other in self.others() {
            transfers.push(self.send(other, &mine, 0..mine.len())?);
        }
        self.wait(what, &mut transfers)?;
        Ok(self.by_rank(&mine, transfers))
    }

    /// The sum of all ranks' numbers.
    fn summed(&self, what: &str, mine: Vec<f32>) -> Result<Vec<f32>> {
        self.require_own_thread()?;
        let part =
            |rank: usize, count: usize| rank * count / self.size..(rank + 1) * count / self.size;
        let count = mine.len();
        let own = part(self.rank, count);
        let mine = Rc::new(mine);
        let mut transfers = Vec::with_capacity(2 * self.size);
        for other in self.others() {
            transfers.push(self.receive(other, own.len())?);
        }
        for other in self.others() {
            transfers.push(self.send(other, &mine, part(other, count))?);
        }
        self.wait(what, &mut transfers)?;
        let parts = self.by_rank(mine.get(own).unwrap_or_default(), transfers);
        let sum = parts.into_iter().reduce(|mut sum, part| {
            sum.iter_mut().zip(part).for_each(|(sum, number)| *sum += number);
            sum
        });
        let sums = self.exchange(what, sum.unwrap_or_default(), |rank| part(rank, count).len())?;
        Ok(sums.concat())
    }

    /// An error unless a buffer is what sums and parts are of.
    fn require_flat(&self, buffer: &Tensor) -> Result<()> {
        if buffer.dtype() == DType::F32 && self.takes(buffer.device()) && buffer.rank() == 1 {
            return Ok(());
        }
        Err(Error::Unsupported(format!(
            "{:?} in {:?} on {:?} over MPI, expected (n) of F32 on the CPU",
            buffer.shape(),
            buffer.dtype(),
            buffer.device().location()
        )))
    }

    /// What is this rank's own, among what was received from the others, by rank.
    fn by_rank<T: Clone>(&self, own: &[T], transfers: Vec<Transfer<T>>) -> Vec<Vec<T>> {
        let mut received = transfers.into_iter().map(Transfer::into_received);
        let of_rank = |rank| match rank == self.rank {
            true => own.to_vec(),
            false => received.next().unwrap_or_default(),
        };
        (0..self.size).map(of_rank).collect()
    }

    fn check(&self, rank: usize, code: c_int) -> Result<()> {
        if code == ffi::MPI_SUCCESS as c_int {
            return Ok(());
        }
        Err(Error::Rank { rank, message: format!("{}is lost (MPI's error {code})", self.on(rank)) })
    }

    /// The machine of a rank, where it is another.
    fn on(&self, rank: usize) -> String {
        match self.hosts.get(rank) {
            Some(host) if self.hosts.get(self.rank) != Some(host) => format!("on {host} "),
            _ => String::new(),
        }
    }
}

impl Part for Mpi {
    fn leave(&self) -> Result<()> {
        self.gather("the end", &[])?;
        drop(self.universe.borrow_mut().take());
        Ok(())
    }

    /// Rank 0 ends all.
    fn outlast_root(&self, limit: Duration) {
        let mut begun = Instant::now();
        while begun.elapsed() < limit {
            // An error says nothing of rank 0's files.
            if self.may_ask() && self.hears_busy().unwrap_or_default() {
                begun = Instant::now();
            }
            thread::sleep(Duration::from_millis(10));
        }
    }

    fn abort(&self, code: u8) {
        if self.may_ask() {
            self.world.abort(c_int::from(code));
        }
    }
}

impl Collectives for Mpi {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn limit(&self) -> Duration {
        self.limit
    }

    fn gather(&self, what: &'static str, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        let place = place(what);
        let headers = self.exchange(what, vec![place, mine.len() as u64], |_| 2)?;
        let mut lengths = Vec::with_capacity(self.size);
        for (rank, header) in headers.iter().enumerate() {
            match header.as_slice() {
                [there, length] if *there == place => lengths.push(*length as usize),
                _ => return Err(elsewhere(rank, what)),
            }
        }
        if lengths.iter().all(|length| *length == 0) {
            return Ok(vec![Vec::new(); self.size]);
        }
        self.exchange(what, mine.to_vec(), |rank| lengths.get(rank).copied().unwrap_or_default())
    }

    fn tell_busy(&self) {
        if self.rank > 0 || self.require_own_thread().is_err() {
            return;
        }
        for other in self.others() {
            let mut request = null();
            // SAFETY: the message has no content to read, so MPI may keep the request for as long as it is under way.
            unsafe {
                let code = ffi::MPI_Isend(
                    std::ptr::null(),
                    0,
                    u8::equivalent_datatype().as_raw(),
                    other as c_int,
                    BUSY,
                    self.world.as_raw(),
                    &mut request,
                );
                if code == ffi::MPI_SUCCESS as c_int {
                    ffi::MPI_Request_free(&mut request);
                }
            }
        }
    }

    fn sum(&self, what: &'static str, buffer: &Tensor) -> Result<()> {
        self.require_flat(buffer)?;
        let count = buffer.elem_count();
        for start in (0..count).step_by(PIECE) {
            let length = PIECE.min(count - start);
            let mine = buffer.narrow(0, start, length)?.to_vec1::<f32>()?;
            let sum = Tensor::from_vec(self.summed(what, mine)?, length, &Device::Cpu)?;
            buffer.slice_set(&sum, 0, start)?;
        }
        Ok(())
    }

    fn spread(&self, what: &'static str, buffer: &Tensor, parts: &[Range<usize>]) -> Result<()> {
        self.require_flat(buffer)?;
        let longest = parts.iter().map(Range::len).max().unwrap_or_default();
        for start in (0..longest).step_by(PIECE) {
            let piece = |rank: usize| -> Range<usize> {
                let part = parts.get(rank).cloned().unwrap_or_default();
                (part.start + start).min(part.end)..(part.start + start + PIECE).min(part.end)
            };
            let own = piece(self.rank);
            let mine = buffer.narrow(0, own.start, own.len())?.to_vec1::<f32>()?;
            let all = self.exchange(what, mine, |rank| piece(rank).len())?;
            for (rank, piece_of) in all.into_iter().enumerate() {
                if rank != self.rank && !piece_of.is_empty() {
                    let length = piece_of.len();
                    let piece_of = Tensor::from_vec(piece_of, length, &Device::Cpu)?;
                    buffer.slice_set(&piece_of, 0, piece(rank).start)?;
                }
            }
        }
        Ok(())
    }

    fn takes(&self, device: &Device) -> bool {
        device.is_cpu()
    }
}

/// A message under way, with the memory that it is read from or written to.
struct Transfer<T> {
    /// The other rank.
    rank: usize,
    request: ffi::MPI_Request,
    done: bool,
    sent: Option<Rc<Vec<T>>>,
    received: Vec<T>,
}

impl<T> Transfer<T> {
    /// Looks whether it is done; gives MPI's code.
    fn test(&mut self) -> c_int {
        let mut done = 0;
        // SAFETY: the request is one that MPI gave and hasn't ended.
        let code = unsafe { ffi::MPI_Test(&mut self.request, &mut done, ffi::RSMPI_STATUS_IGNORE) };
        self.done = done != 0;
        code
    }

    fn into_received(mut self) -> Vec<T> {
        match self.done {
            true => std::mem::take(&mut self.received),
            false => Vec::new(),
        }
    }
}

impl<T> Drop for Transfer<T> {
    /// What MPI may still read or write stays where it is.
    fn drop(&mut self) {
        if !self.done {
            std::mem::forget(self.sent.take());
            std::mem::forget(std::mem::take(&mut self.received));
        }
    }
}

/// No request.
fn null() -> ffi::MPI_Request {
    // SAFETY: a constant of MPI.
    unsafe { ffi::RSMPI_REQUEST_NULL }
}

/// The length of a message as MPI counts.
fn length<T>(message: &[T]) -> Result<c_int> {
    c_int::try_from(message.len()).map_err(|_| {
        Error::Unsupported(format!(
            "a message of {} elements; MPI takes at most {}",
            message.len(),
            c_int::MAX
        ))
    })
}
