//! Messages between ranks over TCP, in the shape of a star: rank 0 hears all others, and answers them.
//!
//! These are what ranks tell each other beside their sums: counts, losses, hashes. A connection that ends is a rank that
//! is lost, which rank 0 tells the others, so that all know which it was. Nothing blocks: whoever waits looks at all
//! connections until its limit. Peers are trusted: who can reach the port of a run and knows its word is taken for a rank.

use super::{Pause, elsewhere, place};
use crate::{Error, Result};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// What a connection begins with: this protocol and its version.
const MAGIC: [u8; 8] = *b"mcandle2";
/// Longer messages are none of a rank's.
const LONGEST: usize = 1 << 30;
/// How much longer others wait than rank 0, which knows more.
const GRACE: Duration = Duration::from_secs(5);
/// How long a connection may take to say who it is.
const GREETING: Duration = Duration::from_secs(10);

/// This process among the ranks.
#[derive(Debug)]
pub(super) struct Star {
    rank: usize,
    size: usize,
    limit: Duration,
    /// How many bytes others take at a time.
    longest: usize,
    /// To the ranks 1, 2, … where this is rank 0, else to rank 0.
    connections: RefCell<Vec<Connection>>,
}

/// What a message is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// A rank's part of what is gathered.
    Given = 1,
    /// All parts.
    Gathered = 2,
    /// That a sum takes longer than the limit here.
    Late = 3,
    /// That a rank is lost: its number, and what is wrong with it.
    Lost = 4,
    /// That rank 0 lives, and does what takes longer than the limit.
    Busy = 5,
    /// That the other way of a rank to the others has failed: how.
    Cut = 6,
    /// Asks whether a rank is there.
    Who = 7,
    /// That it is.
    Here = 8,
}

impl Kind {
    const ALL: [Self; 8] = [
        Self::Given,
        Self::Gathered,
        Self::Late,
        Self::Lost,
        Self::Busy,
        Self::Cut,
        Self::Who,
        Self::Here,
    ];
}

#[derive(Debug)]
struct Message {
    kind: Kind,
    /// The hash of what it is for.
    place: u64,
    bytes: Vec<u8>,
}

impl Star {
    /// Rank 0, which waits at this listener for all others. `word` is what the ranks of one run have in common.
    pub fn of_root(
        listener: &TcpListener,
        size: usize,
        word: &str,
        limit: Duration,
    ) -> Result<Self> {
        let begun = Instant::now();
        let mut ranks: Vec<Option<Connection>> = (1..size).map(|_| None).collect();
        let mut strangers: Vec<(Connection, Instant)> = Vec::new();
        let failed =
            |error| Error::Rank { rank: 0, message: format!("cannot be reached: {error}") };
        listener.set_nonblocking(true).map_err(failed)?;
        let mut pause = Pause::new();
        loop {
            match listener.accept() {
                Ok((stream, _)) => {
                    strangers.push((Connection::new(stream).map_err(failed)?, Instant::now()))
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => tracing::debug!("a rank's connection failed: {error}"),
            }
            let mut waiting = Vec::new();
            for (mut connection, since) in strangers {
                match connection.greeting(word) {
                    Some(Ok((rank, of))) => {
                        if of != size {
                            return Err(Error::Rank {
                                rank,
                                message: format!(
                                    "was started as one of {of} processes, and rank 0 as one of {size}"
                                ),
                            });
                        }
                        match rank.checked_sub(1).and_then(|index| ranks.get_mut(index)) {
                            Some(place @ None) => *place = Some(connection),
                            _ => {
                                return Err(Error::Rank {
                                    rank,
                                    message: "was started twice, or is no rank of this run".into(),
                                });
                            }
                        }
                    }
                    None if since.elapsed() < GREETING && !connection.ended => {
                        waiting.push((connection, since));
                    }
                    _ => tracing::debug!("a connection is none of a rank of this run"),
                }
            }
            strangers = waiting;
            match ranks.iter().position(Option::is_none) {
                None => break,
                Some(index) if begun.elapsed() > limit => {
                    return Err(late(index + 1, "the start", limit));
                }
                Some(_) => pause.rest(),
            }
        }
        let connections = RefCell::new(ranks.into_iter().flatten().collect());
        let star = Self { rank: 0, size, limit, longest: LONGEST, connections };
        star.gather("the start", &[])?;
        Ok(star)
    }

    /// Another rank, which finds rank 0 at this address once it is there.
    pub fn of_other(
        address: &(String, u16),
        rank: usize,
        size: usize,
        word: &str,
        limit: Duration,
    ) -> Result<Self> {
        let begun = Instant::now();
        let (host, port) = address;
        let failed = |error: &dyn std::fmt::Display| Error::Rank {
            rank: 0,
            message: format!("cannot be reached at {host}:{port}: {error}"),
        };
        let stream = loop {
            match connect(address, Duration::from_secs(5)) {
                Ok(stream) => break stream,
                Err(error) if begun.elapsed() > limit => return Err(failed(&error)),
                Err(_) => std::thread::sleep(Duration::from_millis(50)),
            }
        };
        let mut connection = Connection::new(stream).map_err(|error| failed(&error))?;
        connection.outgoing.extend(MAGIC);
        connection.outgoing.extend(place(word).to_le_bytes());
        connection.outgoing.extend((rank as u64).to_le_bytes());
        connection.outgoing.extend((size as u64).to_le_bytes());
        let connections = RefCell::new(vec![connection]);
        let star = Self { rank, size, limit, longest: LONGEST, connections };
        star.gather("the start", &[])?;
        Ok(star)
    }

    pub fn rank(&self) -> usize {
        self.rank
    }

    pub fn size(&self) -> usize {
        self.size
    }

    /// See [`super::Collectives::gather`].
    pub fn gather(&self, what: &str, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        let all = match self.rank {
            0 => self.tell_lost(self.gather_as_root(what, mine))?,
            _ => self.gather_as_other(what, mine)?,
        };
        Ok(all)
    }

    /// See [`super::Collectives::tell_busy`].
    pub fn tell_busy(&self) {
        if self.rank > 0 {
            return;
        }
        for connection in self.connections.borrow_mut().iter_mut() {
            // One that takes nothing is told once.
            match connection.outgoing.is_empty() {
                true => connection.send(Kind::Busy, 0, &[]),
                false => connection.pump(),
            }
        }
    }

    fn gather_as_root(&self, what: &str, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        let place = place(what);
        let begun = Instant::now();
        let connections = &mut *self.connections.borrow_mut();
        let mut given: Vec<Option<Vec<u8>>> = vec![None; connections.len()];
        let mut pause = Pause::new();
        loop {
            let mut missing = None;
            for (index, (connection, given)) in connections.iter_mut().zip(&mut given).enumerate() {
                if given.is_some() {
                    continue;
                }
                let rank = index + 1;
                *given = loop {
                    match connection.next() {
                        Some(Message { kind: Kind::Late, .. }) => {}
                        Some(Message { kind: Kind::Given, place: there, bytes })
                            if there == place =>
                        {
                            break Some(bytes);
                        }
                        Some(_) => return Err(elsewhere(rank, what)),
                        // Who has said that its way has failed may end because of that.
                        None if connection.ended && connection.cut.is_none() => {
                            return Err(lost(rank));
                        }
                        None => break None,
                    }
                };
                missing = missing.or(given.is_none().then_some(rank));
            }
            let Some(rank) = missing else { break };
            if let Some(said) = cut(connections) {
                return Err(find_lost(connections, &said));
            }
            if begun.elapsed() > self.limit {
                return Err(late(rank, what, self.limit));
            }
            pause.rest();
        }
        let all: Vec<Vec<u8>> =
            std::iter::once(mine.to_vec()).chain(given.into_iter().flatten()).collect();
        // As an error of a rank it is told to the others, too.
        self.require_sendable(what, all.iter().map(|part| 8 + part.len()).sum())
            .map_err(|error| Error::Rank { rank: 0, message: error.to_string() })?;
        let mut message = Vec::new();
        for part in &all {
            message.extend((part.len() as u64).to_le_bytes());
            message.extend(part);
        }
        for connection in connections.iter_mut() {
            connection.send(Kind::Gathered, place, &message);
        }
        self.flush(connections, what, begun)?;
        Ok(all)
    }

    /// An error where a message is longer than others take.
    fn require_sendable(&self, what: &str, bytes: usize) -> Result<()> {
        match bytes <= self.longest {
            true => Ok(()),
            false => Err(Error::Unsupported(format!(
                "a message of {bytes} bytes for {what}; ranks take at most {} at a time",
                self.longest
            ))),
        }
    }

    /// Waits until everything is sent, so that a process may end after it.
    fn flush(&self, connections: &mut [Connection], what: &str, begun: Instant) -> Result<()> {
        let mut pause = Pause::new();
        loop {
            let mut behind = None;
            for (index, connection) in connections.iter_mut().enumerate() {
                connection.pump();
                let rank = if self.rank == 0 { index + 1 } else { 0 };
                if !connection.outgoing.is_empty() {
                    if connection.ended {
                        return Err(lost(rank));
                    }
                    behind = behind.or(Some(rank));
                }
            }
            let Some(rank) = behind else { return Ok(()) };
            if begun.elapsed() > self.limit + GRACE {
                return Err(late(rank, what, self.limit));
            }
            pause.rest();
        }
    }

    fn gather_as_other(&self, what: &str, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        let place = place(what);
        let begun = Instant::now();
        let connections = &mut *self.connections.borrow_mut();
        let connection = root(connections)?;
        connection.is_late = false;
        self.require_sendable(what, mine.len())?;
        connection.send(Kind::Given, place, mine);
        let mut pause = Pause::new();
        let bytes = loop {
            match connection.next() {
                Some(Message { kind: Kind::Gathered, place: there, bytes }) if there == place => {
                    break bytes;
                }
                Some(Message { kind: Kind::Lost, bytes, .. }) => return Err(told(&bytes)),
                Some(_) => return Err(elsewhere(0, what)),
                None if connection.ended => return Err(lost(0)),
                None => {}
            }
            if connection.waited(begun) > self.limit + GRACE {
                return Err(late(0, what, self.limit));
            }
            pause.rest();
        };
        let mut rest = bytes.as_slice();
        let mut all = Vec::with_capacity(self.size);
        while let Some((length, others)) = rest.split_first_chunk::<8>() {
            let part = usize::try_from(u64::from_le_bytes(*length)).ok();
            let Some((part, others)) = part.and_then(|length| others.split_at_checked(length))
            else {
                return Err(elsewhere(0, what));
            };
            all.push(part.to_vec());
            rest = others;
        }
        match all.len() == self.size {
            true => Ok(all),
            false => Err(elsewhere(0, what)),
        }
    }

    /// That all ranks live, while this one waits since `begun` for what they do together over other ways.
    ///
    /// # Errors
    /// [`Error::Rank`] naming one that is lost, or that stands still when the limit is over.
    pub fn watch(&self, what: &str, begun: Instant) -> Result<()> {
        if self.rank == 0 {
            return self.tell_lost(self.watch_as_root(what, begun.elapsed()));
        }
        let connections = &mut *self.connections.borrow_mut();
        let connection = root(connections)?;
        connection.pump();
        if let Some(Message { kind: Kind::Lost, bytes, .. }) = connection.messages.front() {
            return Err(told(bytes));
        }
        if connection.ended && connection.messages.is_empty() {
            return Err(lost(0));
        }
        let waited = connection.waited(begun);
        if waited > self.limit && !connection.is_late {
            connection.is_late = true;
            connection.send(Kind::Late, place(what), &[]);
        }
        match waited > self.limit + GRACE {
            true => Err(late(0, what, self.limit)),
            false => Ok(()),
        }
    }

    fn watch_as_root(&self, what: &str, waited: Duration) -> Result<()> {
        let connections = &mut *self.connections.borrow_mut();
        for (index, connection) in connections.iter_mut().enumerate() {
            connection.pump();
            if connection.ended && connection.messages.is_empty() && connection.cut.is_none() {
                return Err(lost(index + 1));
            }
        }
        if let Some(said) = cut(connections) {
            return Err(find_lost(connections, &said));
        }
        // Those that wait as well are told apart from the one that they wait for by saying so.
        if waited > self.limit + GRACE / 2 {
            let says_so = |connection: &Connection| {
                connection.messages.iter().any(|message| message.kind == Kind::Late)
            };
            let rank = connections.iter().position(|connection| !says_so(connection));
            return Err(match rank {
                Some(index) => late(index + 1, what, self.limit),
                None => Error::Rank {
                    rank: 0,
                    message: format!(
                        "and all others waited {} s for {what}, which did not end; NCCL_DEBUG=INFO shows what NCCL does",
                        self.limit.as_secs_f64()
                    ),
                },
            });
        }
        Ok(())
    }

    /// What a rank ends with whose other way to the others has failed, as it says: another rank is lost, which rank 0 looks
    /// for.
    pub fn cut(&self, said: &str) -> Error {
        if self.rank == 0 {
            let found = find_lost(&mut self.connections.borrow_mut(), said);
            return match self.tell_lost::<()>(Err(found)) {
                Err(found) => found,
                Ok(()) => lost(0),
            };
        }
        let connections = &mut *self.connections.borrow_mut();
        let Some(connection) = connections.first_mut() else { return lost(0) };
        connection.send(Kind::Cut, 0, said.as_bytes());
        let begun = Instant::now();
        while begun.elapsed() < 2 * GRACE {
            match connection.next() {
                Some(Message { kind: Kind::Lost, bytes, .. }) => return told(&bytes),
                Some(_) => {}
                None if connection.ended => return lost(0),
                None => std::thread::sleep(Duration::from_millis(1)),
            }
        }
        // Not rank 0's name: it may be there, and have a checkpoint to save.
        let message = format!("cannot reach another rank, and rank 0 doesn't say which: {said}");
        Error::Rank { rank: self.rank, message }
    }

    /// Tells all others which rank is lost, if one is.
    fn tell_lost<T>(&self, outcome: Result<T>) -> Result<T> {
        if let Err(Error::Rank { rank, message }) = &outcome {
            let mut bytes = (*rank as u64).to_le_bytes().to_vec();
            bytes.extend(message.as_bytes());
            let begun = Instant::now();
            let connections = &mut *self.connections.borrow_mut();
            for connection in connections.iter_mut() {
                connection.send(Kind::Lost, 0, &bytes);
            }
            // The lost one's own connection may be full.
            while begun.elapsed() < Duration::from_secs(1)
                && connections
                    .iter()
                    .any(|connection| !connection.outgoing.is_empty() && !connection.ended)
            {
                connections.iter_mut().for_each(Connection::pump);
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        outcome
    }

    /// Waits until rank 0 has ended, but no longer than this after it has said that it is busy.
    pub fn outlast_root(&self, limit: Duration) {
        let begun = Instant::now();
        while let Some(connection) = self.connections.borrow_mut().first_mut()
            && !connection.ended
            && connection.waited(begun) < limit
        {
            connection.pump();
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// How the other way of a rank has failed, if one has said so.
fn cut(connections: &[Connection]) -> Option<String> {
    connections.iter().find_map(|connection| connection.cut.clone())
}

/// Which rank is lost, where another way than these connections has failed, as somebody has said: one whose connection ends,
/// or that doesn't answer. It is never rank 0, as others end at once without that one, which may have a checkpoint to save.
fn find_lost(connections: &mut [Connection], said: &str) -> Error {
    let begun = Instant::now();
    connections.iter_mut().for_each(|connection| connection.send(Kind::Who, 0, &[]));
    while begun.elapsed() < GRACE {
        connections.iter_mut().for_each(Connection::pump);
        // Who has said that its way has failed may end because of that.
        let ended = |connection: &Connection| connection.ended && connection.cut.is_none();
        if let Some(index) = connections.iter().position(ended) {
            return lost(index + 1);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    let is_silent = |connection: &Connection| !connection.is_here && connection.cut.is_none();
    let seconds = GRACE.as_secs_f64();
    let mut silent = (1..).zip(connections.iter()).filter(|(_, it)| is_silent(it));
    if let Some((rank, _)) = silent.next() {
        // One that computes for longer answers as little as one that is lost.
        let others: Vec<String> = silent.map(|(rank, _): (usize, _)| rank.to_string()).collect();
        let message = match others.is_empty() {
            true => format!("is lost: it didn't answer for {seconds} s, and {said}"),
            false => format!(
                "didn't answer for {seconds} s, nor did {}; one of them is lost: {said}",
                others.join(", ")
            ),
        };
        return Error::Rank { rank, message };
    }
    match connections.iter().position(|connection| connection.cut.is_some()) {
        Some(index) => Error::Rank {
            rank: index + 1,
            message: format!("is cut off from another rank, though all answer: {said}"),
        },
        None => Error::Rank {
            rank: 1,
            message: format!(
                "is cut off from rank 0, or another rank is, though all answer: {said}"
            ),
        },
    }
}

/// The connection to rank 0.
fn root(connections: &mut [Connection]) -> Result<&mut Connection> {
    connections.first_mut().ok_or_else(|| lost(0))
}

fn lost(rank: usize) -> Error {
    Error::Rank { rank, message: "is lost: its connection has ended".into() }
}

fn late(rank: usize, what: &str, limit: Duration) -> Error {
    Error::Rank {
        rank,
        message: format!(
            "didn't take part in {what} within {} s; it is lost, or slower than this limit allows",
            limit.as_secs_f64()
        ),
    }
}

/// What rank 0 has found of a rank.
fn told(bytes: &[u8]) -> Error {
    match bytes.split_first_chunk::<8>() {
        Some((rank, message)) => Error::Rank {
            rank: u64::from_le_bytes(*rank) as usize,
            message: String::from_utf8_lossy(message).into_owned(),
        },
        None => lost(0),
    }
}

/// Connects to a host by the first of its addresses that answers within `limit`.
pub(super) fn connect((host, port): &(String, u16), limit: Duration) -> std::io::Result<TcpStream> {
    let mut failed = std::io::Error::new(ErrorKind::NotFound, "it has no address");
    for address in (host.as_str(), *port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, limit) {
            Ok(stream) => return Ok(stream),
            Err(error) => failed = error,
        }
    }
    Err(failed)
}

/// A connection to another rank. Nothing it does waits.
#[derive(Debug)]
struct Connection {
    stream: TcpStream,
    /// What has come, but for whole messages.
    incoming: Vec<u8>,
    messages: VecDeque<Message>,
    /// What is to be sent.
    outgoing: VecDeque<u8>,
    /// Nothing comes or goes any more.
    ended: bool,
    /// This rank has said that it waits.
    is_late: bool,
    /// When the other end has said last that it is busy.
    busy: Option<Instant>,
    /// How the other end's other way to the ranks has failed.
    cut: Option<String>,
    /// The other end has answered that it is there.
    is_here: bool,
}

impl Connection {
    fn new(stream: TcpStream) -> std::io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        Ok(Self {
            stream,
            incoming: Vec::new(),
            messages: VecDeque::new(),
            outgoing: VecDeque::new(),
            ended: false,
            is_late: false,
            busy: None,
            cut: None,
            is_here: false,
        })
    }

    /// How long somebody who waits since `begun` has heard nothing of the other end.
    fn waited(&self, begun: Instant) -> Duration {
        self.busy.map_or(begun, |busy| busy.max(begun)).elapsed()
    }

    /// Who is at the other end, once it has said so: its rank, of how many. An error where it is no rank of this run.
    fn greeting(&mut self, word: &str) -> Option<std::result::Result<(usize, usize), ()>> {
        const LENGTH: usize = MAGIC.len() + 3 * 8;
        self.receive();
        let greeting = self.incoming.get(..LENGTH)?;
        let (magic, numbers) = greeting.split_at(MAGIC.len());
        let numbers = numbers.as_chunks::<8>().0;
        let found = match numbers {
            [its_word, rank, size]
                if magic == MAGIC && u64::from_le_bytes(*its_word) == place(word) =>
            {
                Ok((u64::from_le_bytes(*rank) as usize, u64::from_le_bytes(*size) as usize))
            }
            _ => Err(()),
        };
        self.incoming.drain(..LENGTH);
        Some(found)
    }

    fn send(&mut self, kind: Kind, place: u64, bytes: &[u8]) {
        self.outgoing.push_back(kind as u8);
        self.outgoing.extend(place.to_le_bytes());
        self.outgoing.extend((bytes.len() as u64).to_le_bytes());
        self.outgoing.extend(bytes);
        self.pump();
    }

    /// The next message, if it has come.
    fn next(&mut self) -> Option<Message> {
        self.pump();
        self.messages.pop_front()
    }

    /// Sends and takes what can be sent and taken now.
    fn pump(&mut self) {
        while !self.ended && !self.outgoing.is_empty() {
            match self.stream.write(self.outgoing.as_slices().0) {
                Ok(0) => self.ended = true,
                Ok(sent) => drop(self.outgoing.drain(..sent)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => {
                    // What the other end has said before is still there.
                    self.outgoing.clear();
                    break;
                }
            }
        }
        self.receive();
        while let Some(message) = self.parse() {
            match message.kind {
                Kind::Busy => self.busy = Some(Instant::now()),
                Kind::Cut => self.cut = Some(String::from_utf8_lossy(&message.bytes).into_owned()),
                Kind::Who => self.send(Kind::Here, 0, &[]),
                Kind::Here => self.is_here = true,
                _ => self.messages.push_back(message),
            }
        }
    }

    fn receive(&mut self) {
        let mut buffer = [0; 1 << 16];
        while !self.ended {
            match self.stream.read(&mut buffer) {
                Ok(0) => self.ended = true,
                Ok(count) => self.incoming.extend(buffer.iter().take(count)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => self.ended = true,
            }
        }
    }

    /// A whole message of what has come.
    fn parse(&mut self) -> Option<Message> {
        const HEADER: usize = 1 + 2 * 8;
        let (kind, rest) = self.incoming.split_first()?;
        let (place, rest) = rest.split_first_chunk::<8>()?;
        let (length, rest) = rest.split_first_chunk::<8>()?;
        let kind = Kind::ALL.into_iter().find(|known| *known as u8 == *kind);
        let length = usize::try_from(u64::from_le_bytes(*length)).unwrap_or(usize::MAX);
        let Some(kind) = kind.filter(|_| length <= LONGEST) else {
            // No rank of this program sends this.
            self.ended = true;
            self.incoming.clear();
            return None;
        };
        let message = Message {
            kind,
            place: u64::from_le_bytes(*place),
            bytes: rest.get(..length)?.to_vec(),
        };
        self.incoming.drain(..HEADER + length);
        Some(message)
    }
}

#[cfg(test)]
mod tests;
