//! Sums over the GPUs of several processes, and tensors of which each has a part, by NVIDIA's NCCL.
//!
//! NCCL's library is looked for when a [`Communicator`] joins, by its own name `libnccl.so.2`, which is how Linux
//! distributions and NVIDIA's Python packages have it. (cudarc looks for other names, and needs the library when a
//! program is linked.) A communicator is one that doesn't block: its calls and the work that they launch, beside
//! that of the device, are looked at until they are done, so whoever waits can give up, and the work ends then.
//!
//! The order in which NCCL adds follows from how many GPUs there are and how they are linked: the same sums every time
//! on the same machines.

mod library;

use crate::backend::cuda::{Array, Cuda, Event, Lane, give_back};
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::sys::CUstream;
use candle_core::{DType, Device, Error, Tensor, bail};
use library::{
    BFLOAT16, BYTE, Comm, Config, FLOAT16, FLOAT32, IN_PROGRESS, Id, Library, OF_CONNECTIONS,
    SUCCESS, SUM,
};
use std::cell::{Cell, OnceCell, RefCell};
use std::ffi::c_int;
use std::time::{Duration, Instant};

type Result<T, E = Error> = std::result::Result<T, E>;

/// Bytes of an [`unique_id`].
pub const ID_BYTES: usize = library::ID_BYTES;

/// How long the host looks without rest whether work is done, and how long it rests then between two looks.
const BUSY: Duration = Duration::from_millis(20);
const REST: Duration = Duration::from_micros(50);
/// How long a call may go on that nobody waits for any more, before it is ended.
const GRACE: Duration = Duration::from_secs(5);

/// What a new group of processes is known by: one of them makes it, and all join with it.
///
/// # Errors
/// When NCCL's library is missing, or NCCL fails.
pub fn unique_id() -> Result<[u8; ID_BYTES]> {
    let library = Library::get()?;
    let mut id = Id([0; ID_BYTES]);
    // SAFETY: NCCL writes an id to a place for one.
    library.check("an id for a group", unsafe { (library.get_unique_id)(&mut id) })?;
    Ok(id.0)
}

/// A place in a communicator's work beside that of the device.
#[derive(Debug)]
pub struct Mark(Event);

/// One process's part in a group, each with a GPU of its own.
#[derive(Debug)]
pub struct Communicator {
    library: &'static Library,
    /// Null once it has ended.
    comm: Cell<Comm>,
    device: Device,
    rank: usize,
    size: usize,
    /// Where all its work is done, but for [`Self::sum`].
    lane: OnceCell<Lane>,
    /// Whether there were sums among the device's work, which recordings may have.
    is_summed_in_order: Cell<bool>,
    /// What a call that hasn't ended may still launch work on.
    kept: RefCell<Vec<Tensor>>,
    /// Whether NCCL has failed as it does where another process, or the way to it, is lost.
    is_cut: Cell<bool>,
}

// SAFETY: NCCL's communicators are of no thread, only of one at a time.
unsafe impl Send for Communicator {}

impl Communicator {
    /// Joins the group of `size` processes that `id` is of, as number `rank`, with this device. All of them do so at the
    /// same time. `wait` is called again and again until then; its error ends the waiting.
    ///
    /// # Errors
    /// That of `wait`, one that says that the device is no NVIDIA GPU or NCCL's library is missing, and NCCL's own, as
    /// when two processes have the same GPU.
    pub fn join<E: From<Error>>(
        device: &Device,
        id: [u8; ID_BYTES],
        rank: usize,
        size: usize,
        wait: impl FnMut() -> Result<(), E>,
    ) -> Result<Self, E> {
        let library = Library::get()?;
        let cuda = Cuda::on(device)?;
        cuda.stream.context().bind_to_thread().w()?;
        // NCCL takes memory of its own.
        give_back(device)?;
        let mut comm: Comm = std::ptr::null_mut();
        let mut config = Config::without_blocking();
        let (count, number) = (number("processes", size)?, number("processes", rank)?);
        // SAFETY: the id and the settings are as NCCL wants them, and the place is one for a communicator.
        let code =
            unsafe { (library.init_rank_config)(&mut comm, count, Id(id), number, &mut config) };
        if code != SUCCESS && code != IN_PROGRESS {
            library.check("joining a group", code)?;
        }
        if comm.is_null() {
            return Err(
                Error::Msg("metal-candle-kernels: nccl: gave no communicator".into()).into()
            );
        }
        let (comm, device, lane) = (Cell::new(comm), device.clone(), OnceCell::new());
        let is_summed_in_order = Cell::new(false);
        let (kept, is_cut) = (RefCell::default(), Cell::new(false));
        let joined =
            Self { library, comm, device, rank, size, lane, is_summed_in_order, kept, is_cut };
        joined.until("joining a group", wait, || Ok(true))?;
        Ok(joined)
    }

    /// Begins to add up the processes' buffers `(n)` in f32 on the device, in place. That is done beside the work of the
    /// device which is launched after this, and the sums may be read once [`Self::end`] has seen that it is done; until
    /// then, the buffer stays, and nobody else writes to it. `wait` as for [`Self::join`]. After an error what is in the
    /// buffer is no sum, and the communicator has ended.
    ///
    /// # Errors
    /// That of `wait`, one that says that the buffer is none of these, and NCCL's own.
    pub fn begin_sum<E: From<Error>>(
        &self,
        buffer: &Tensor,
        wait: impl FnMut() -> Result<(), E>,
    ) -> Result<(), E> {
        self.require_numbers(buffer)?;
        if buffer.elem_count() == 0 {
            return Ok(());
        }
        let (array, lane) = self.behind_the_work(buffer)?;
        // SAFETY: the buffer lives until the lane is done with this, which the caller waits for.
        let code = unsafe { self.add_up(&array, FLOAT32, lane.stream()) };
        self.launched("a sum", code, wait)
    }

    /// Begins to add up the processes' buffers `(processes · n)` in f32 on the device: afterwards each has the sums of its own
    /// part by rank in place, and anything in the rest. Else as [`Self::begin_sum`].
    ///
    /// # Errors
    /// As [`Self::begin_sum`].
    pub fn begin_sum_of_parts<E: From<Error>>(
        &self,
        buffer: &Tensor,
        wait: impl FnMut() -> Result<(), E>,
    ) -> Result<(), E> {
        self.require_numbers(buffer)?;
        let (count, rest) = (buffer.elem_count() / self.size, buffer.elem_count() % self.size);
        if rest != 0 {
            return Err(Error::Msg(format!(
                "metal-candle-kernels: nccl: cannot cut {} elements into a part for each of {} processes",
                buffer.elem_count(),
                self.size
            ))
            .into());
        }
        if count == 0 {
            return Ok(());
        }
        let (array, lane) = self.behind_the_work(buffer)?;
        let own = array.pointer + (self.rank * count * size_of::<f32>()) as u64;
        // SAFETY: the buffer has so many numbers for each process and lives until the lane is done with this, which the
        // caller waits for.
        let code = unsafe {
            (self.library.reduce_scatter)(
                array.pointer as *const _,
                own as *mut _,
                count,
                FLOAT32,
                SUM,
                self.comm.get(),
                lane.stream().cast(),
            )
        };
        self.launched("a sum of parts", code, wait)
    }

    /// A tensor, and the lane, where what comes next begins behind the work of the device so far.
    fn behind_the_work(&self, buffer: &Tensor) -> Result<(Array, &Lane)> {
        self.check_alive()?;
        let (array, lane) = (Cuda::on(&self.device)?.strided(buffer)?, self.lane()?);
        lane.follow()?;
        Ok((array, lane))
    }

    /// Adds up all elements in place.
    ///
    /// # Safety
    /// They are numbers of this kind, are not freed before the stream has done this, and nobody else uses them until then.
    unsafe fn add_up(&self, array: &Array, kind: c_int, stream: CUstream) -> c_int {
        let address = array.pointer;
        // SAFETY: as above.
        unsafe {
            (self.library.all_reduce)(
                address as *const _,
                address as *mut _,
                array.tensor.elem_count(),
                kind,
                SUM,
                self.comm.get(),
                stream.cast(),
            )
        }
    }

    /// An error unless a tensor is contiguous `(n)` in f32 on this device.
    fn require_numbers(&self, buffer: &Tensor) -> Result<()> {
        if buffer.dtype() == DType::F32 && self.is_flat(buffer) {
            return Ok(());
        }
        bail!(
            "metal-candle-kernels: nccl: cannot sum {:?} in {:?} on {:?}, expected contiguous (n) in F32 on the group's GPU",
            buffer.shape(),
            buffer.dtype(),
            buffer.device().location()
        )
    }

    /// Adds up the members' tensors in f32, bf16 or f16 in place, each contiguous and of the same size, among the work of
    /// the device: what is launched after this reads the sum, and a [`Recording`](crate::recording::Recording) may
    /// have it. Sums of more than two in bf16 and f16 are rounded on their way. `wait` as for [`Self::join`]; after its error
    /// the sum may have been launched or not, and what was launched before goes on.
    ///
    /// # Errors
    /// That of `wait`, one that says that the tensor is none of these, and NCCL's own.
    pub fn sum<E: From<Error>>(
        &self,
        x: &Tensor,
        wait: impl FnMut() -> Result<(), E>,
    ) -> Result<(), E> {
        let kind = match x.dtype() {
            DType::F32 => Some(FLOAT32),
            DType::BF16 => Some(BFLOAT16),
            DType::F16 => Some(FLOAT16),
            _ => None,
        };
        let fits = x.is_contiguous() && x.device().same_device(&self.device);
        let Some(kind) = kind.filter(|_| fits) else {
            return Err(Error::Msg(format!(
                "metal-candle-kernels: nccl: cannot sum {:?} in {:?} on {:?}, expected contiguous in F32, BF16 or F16 on the \
                 group's GPU",
                x.shape(),
                x.dtype(),
                x.device().location()
            ))
            .into());
        };
        if x.elem_count() == 0 {
            return Ok(());
        }
        self.check_alive()?;
        self.is_summed_in_order.set(true);
        let cuda = Cuda::on(&self.device)?;
        let array = cuda.strided(x)?;
        // SAFETY: all that reads or frees them is launched on the same stream after this.
        let code = unsafe { self.add_up(&array, kind, cuda.stream.cu_stream()) };
        let (mut given_up, mut wait) = (None, wait);
        // NCCL may launch it as long as its call goes on, so the tensor has to be there that long.
        let launched = self.launched("a sum", code, || {
            let (error, since) = match given_up.take() {
                None => match wait() {
                    Ok(()) => return Ok(()),
                    Err(error) => (error, Instant::now()),
                },
                Some(given_up) => given_up,
            };
            if since.elapsed() > GRACE {
                self.kept.borrow_mut().push(x.clone());
                return Err(error);
            }
            given_up = Some((error, since));
            Ok(())
        });
        launched.and(given_up.map_or(Ok(()), |(error, _)| Err(error)))
    }

    /// Begins to put together tensors of which each process has a part: for each of `parts`, `(n)` in any dtype and of
    /// the same size in all processes, a tensor `(processes · n)` with their parts by rank. That is done beside the work
    /// of the device which is launched after this, and what is given may be used once [`Self::end`] has seen that
    /// it is done; until then, `parts` stay. `wait` as for [`Self::join`]; after an error the communicator has ended.
    ///
    /// # Errors
    /// That of `wait`, one that says that the parts are none of these, and NCCL's own.
    pub fn begin_gather<E: From<Error>>(
        &self,
        parts: &[Tensor],
        mut wait: impl FnMut() -> Result<(), E>,
    ) -> Result<Vec<Tensor>, E> {
        self.check_alive()?;
        let cuda = Cuda::on(&self.device)?;
        let mut arrays = Vec::with_capacity(parts.len());
        for part in parts {
            self.require_flat("gather", part)?;
            let whole = cuda.empty(self.size * part.elem_count(), part.dtype())?;
            arrays.push((cuda.strided(part)?, whole));
        }
        let lane = self.lane()?;
        lane.follow()?;
        for (part, whole) in &arrays {
            let bytes = part.tensor.elem_count() * part.dtype.size_in_bytes();
            if bytes == 0 {
                continue;
            }
            // SAFETY: the second has `size` times the bytes of the first, and both live until the lane is done, which
            // the caller waits for.
            let code = unsafe {
                (self.library.all_gather)(
                    part.pointer as *const _,
                    whole.pointer as *mut _,
                    bytes,
                    BYTE,
                    self.comm.get(),
                    lane.stream().cast(),
                )
            };
            self.launched("putting a tensor together", code, &mut wait)?;
        }
        Ok(arrays.into_iter().map(|(_, whole)| whole.tensor).collect())
    }

    /// Begins to give each process's part to all others, in place: `parts` by process, each contiguous `(n)` in any dtype
    /// on the device, of the same sizes in all processes. That is done beside the work of the device which is launched
    /// after this, and may be read once [`Self::end`] has seen that it is done; until then, the parts stay, and nobody else
    /// writes to them. `wait` as for [`Self::join`]; after an error the communicator has ended.
    ///
    /// # Errors
    /// That of `wait`, one that says that the parts are none of these, and NCCL's own.
    pub fn begin_spread<E: From<Error>>(
        &self,
        parts: &[Tensor],
        wait: impl FnMut() -> Result<(), E>,
    ) -> Result<(), E> {
        const WHAT: &str = "giving parts to others";
        self.check_alive()?;
        if parts.len() != self.size {
            return Err(Error::Msg(format!(
                "metal-candle-kernels: nccl: {} parts, expected one for each of {} processes",
                parts.len(),
                self.size
            ))
            .into());
        }
        let cuda = Cuda::on(&self.device)?;
        let mut arrays = Vec::with_capacity(parts.len());
        for part in parts {
            self.require_flat("give", part)?;
            arrays.push(cuda.strided(part)?);
        }
        let lane = self.lane()?;
        lane.follow()?;
        // SAFETY: NCCL's calls of this thread up to the end are launched together.
        let mut code = unsafe { (self.library.group_start)() };
        for (rank, array) in arrays.iter().enumerate() {
            let bytes = array.tensor.elem_count() * array.dtype.size_in_bytes();
            if bytes == 0 || (code != SUCCESS && code != IN_PROGRESS) {
                continue;
            }
            // SAFETY: there are so many bytes, which live until the lane is done; the caller waits for that.
            code = unsafe {
                (self.library.broadcast)(
                    array.pointer as *const _,
                    array.pointer as *mut _,
                    bytes,
                    BYTE,
                    rank as c_int,
                    self.comm.get(),
                    lane.stream().cast(),
                )
            };
        }
        // SAFETY: as above.
        let end = unsafe { (self.library.group_end)() };
        let code = if code == SUCCESS || code == IN_PROGRESS { end } else { code };
        self.launched(WHAT, code, wait)
    }

    /// Whether a tensor is contiguous `(n)` on this device.
    fn is_flat(&self, x: &Tensor) -> bool {
        x.rank() == 1 && x.is_contiguous() && x.device().same_device(&self.device)
    }

    /// An error unless it is.
    fn require_flat(&self, what: &str, part: &Tensor) -> Result<()> {
        if self.is_flat(part) {
            return Ok(());
        }
        bail!(
            "metal-candle-kernels: nccl: cannot {what} {:?} on {:?}, expected contiguous (n) on the group's GPU",
            part.shape(),
            part.device().location()
        )
    }

    /// The place behind all that was begun; none where that is nothing.
    ///
    /// # Errors
    /// When the device fails.
    pub fn mark(&self) -> Result<Option<Mark>> {
        self.lane.get().map(|lane| lane.mark().map(Mark)).transpose()
    }

    /// Waits until what was begun before `mark` is done.
    ///
    /// # Errors
    /// That of `wait`, and NCCL's own.
    pub fn until_mark<E: From<Error>>(
        &self,
        mark: Option<&Mark>,
        wait: impl FnMut() -> Result<(), E>,
    ) -> Result<(), E> {
        self.check_alive()?;
        match mark {
            Some(Mark(event)) => self.until("work with other processes", wait, || event.is_done()),
            None => Ok(()),
        }
    }

    /// Waits until all that was begun is done.
    ///
    /// # Errors
    /// That of `wait`, and NCCL's own.
    pub fn end<E: From<Error>>(&self, wait: impl FnMut() -> Result<(), E>) -> Result<(), E> {
        self.check_alive()?;
        match self.lane.get() {
            Some(lane) => self.until("work with other processes", wait, || lane.is_done()),
            None => Ok(()),
        }
    }

    fn lane(&self) -> Result<&Lane> {
        if let Some(lane) = self.lane.get() {
            return Ok(lane);
        }
        let lane = Lane::new(&self.device)?;
        Ok(self.lane.get_or_init(|| lane))
    }

    /// Looks until a call that gave this code has launched its work, as the next call may come only then.
    fn launched<E: From<Error>>(
        &self,
        what: &str,
        code: c_int,
        wait: impl FnMut() -> Result<(), E>,
    ) -> Result<(), E> {
        if code != SUCCESS && code != IN_PROGRESS {
            self.abort();
            self.check(what, code)?;
        }
        self.until(what, wait, || Ok(true))
    }

    /// The error of one of NCCL's codes, if it is one.
    fn check(&self, what: &str, code: c_int) -> Result<()> {
        self.is_cut.set(self.is_cut.get() || OF_CONNECTIONS.contains(&code));
        self.library.check(what, code)
    }

    /// Whether NCCL has failed as it does where another process, or the way to it, is lost. Over a network NCCL notices that
    /// by itself, and doesn't say which process it is. It is said once: what is asked of a group that has ended fails for
    /// that.
    pub fn take_cut(&self) -> bool {
        self.is_cut.take()
    }

    fn check_alive(&self) -> Result<()> {
        match self.comm.get().is_null() {
            true => bail!("metal-candle-kernels: nccl: the group has ended"),
            false => Ok(()),
        }
    }

    /// Looks until NCCL's last call has ended and then until `is_done`; ends the communicator's work on an error.
    fn until<E: From<Error>>(
        &self,
        what: &str,
        mut wait: impl FnMut() -> Result<(), E>,
        is_done: impl Fn() -> Result<bool>,
    ) -> Result<(), E> {
        let begun = Instant::now();
        let mut look = || -> Result<(), E> {
            loop {
                let mut state: c_int = SUCCESS;
                // SAFETY: the communicator lives, and the place is one for a code.
                let code = unsafe { (self.library.get_async_error)(self.comm.get(), &mut state) };
                self.check(what, code)?;
                match state {
                    SUCCESS if is_done()? => return Ok(()),
                    SUCCESS | IN_PROGRESS => {}
                    failed => self.check(what, failed)?,
                }
                wait()?;
                match begun.elapsed() < BUSY {
                    true => std::thread::yield_now(),
                    false => std::thread::sleep(REST),
                }
            }
        };
        let done = look();
        if done.is_err() {
            self.abort();
        }
        done
    }

    /// Ends what NCCL does for this process, also what waits for others. What is asked for later is an error.
    pub fn abort(&self) {
        let comm = self.comm.replace(std::ptr::null_mut());
        if comm.is_null() {
            return;
        }
        let (library, address) = (self.library, comm as usize);
        // What fails here has nobody to tell: the process has an error to end with, or is done.
        let end = move || {
            // SAFETY: this frees the communicator, which nobody finds any more.
            let _ = unsafe { (library.abort)(address as Comm) };
        };
        match self.is_summed_in_order.get() {
            // NCCL waits until no recording has a part in it, which may be this thread's.
            true => drop(std::thread::spawn(end)),
            false => end(),
        }
    }
}

impl Drop for Communicator {
    /// Its work was waited for, or waits itself for others who don't come. Taking leave of them in order could, too.
    fn drop(&mut self) {
        self.abort();
    }
}

/// A number as NCCL has it.
fn number(what: &str, number: usize) -> Result<c_int> {
    match c_int::try_from(number) {
        Ok(number) => Ok(number),
        Err(_) => bail!("metal-candle-kernels: nccl: {number} {what} are too many"),
    }
}

#[cfg(test)]
mod tests;
