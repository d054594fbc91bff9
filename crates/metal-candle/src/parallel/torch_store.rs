//! The store of `torchrun`'s agent, in which ranks leave words for each other: a client of PyTorch's `TCPStore`
//! (`torch/csrc/distributed/c10d/TCPStore.cpp`), of which it sets a key and waits for one.
//!
//! A connection says a magic number first. A request is a byte that says which, and then its words; a word is its length
//! in 64 bits and its bytes. All numbers are little-endian, as those of the machines that PyTorch runs on.

use super::tcp::connect;
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

const MAGIC: u32 = 0x3C85_F7CE;
/// A word for a rank is short.
const LONGEST: u64 = 1 << 10;
const REST: Duration = Duration::from_millis(50);

/// Requests.
const VALIDATE: u8 = 0;
const SET: u8 = 1;
const GET: u8 = 3;
const CHECK: u8 = 5;
/// The answer to [`CHECK`] where all keys are there.
const READY: u8 = 0;

/// A connection to the store.
#[derive(Debug)]
pub(super) struct Store(TcpStream);

impl Store {
    /// Connects to the store at this address, which answers within `limit`.
    pub fn connect(address: &(String, u16), limit: Duration) -> Result<Self> {
        let mut stream = connect(address, limit)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(limit))?;
        stream.set_write_timeout(Some(limit))?;
        let mut greeting = vec![VALIDATE];
        greeting.extend(MAGIC.to_le_bytes());
        stream.write_all(&greeting)?;
        Ok(Self(stream))
    }

    /// Leaves a word.
    pub fn set(&mut self, key: &str, word: &[u8]) -> Result<()> {
        let mut request = vec![SET];
        add(&mut request, key.as_bytes());
        add(&mut request, word);
        self.0.write_all(&request)
    }

    /// Waits for a word, but no longer than `limit`.
    pub fn wait(&mut self, key: &str, limit: Duration) -> Result<Vec<u8>> {
        let begun = Instant::now();
        while !self.has(key)? {
            if begun.elapsed() > limit {
                return Err(Error::new(ErrorKind::TimedOut, format!("nobody has set {key} there")));
            }
            std::thread::sleep(REST);
        }
        let mut request = vec![GET];
        add(&mut request, key.as_bytes());
        self.0.write_all(&request)?;
        let mut length = [0; 8];
        self.0.read_exact(&mut length)?;
        let length = u64::from_le_bytes(length);
        if length > LONGEST {
            return Err(Error::new(
                ErrorKind::InvalidData,
                format!("{key} has {length} bytes there"),
            ));
        }
        let mut word = vec![0; length as usize];
        self.0.read_exact(&mut word)?;
        Ok(word)
    }

    fn has(&mut self, key: &str) -> Result<bool> {
        let mut request = vec![CHECK];
        request.extend(1u64.to_le_bytes());
        add(&mut request, key.as_bytes());
        self.0.write_all(&request)?;
        let mut answer = [0];
        self.0.read_exact(&mut answer)?;
        Ok(answer == [READY])
    }
}

fn add(request: &mut Vec<u8>, word: &[u8]) {
    request.extend((word.len() as u64).to_le_bytes());
    request.extend(word);
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use std::collections::HashMap;
    use std::net::TcpListener;
    use std::sync::{Arc, Mutex};
    use std::thread;

    type Words = Arc<Mutex<HashMap<Vec<u8>, Vec<u8>>>>;

    /// A store as PyTorch's agent has it, as far as it is asked here; gives its port.
    pub(in super::super) fn serve() -> u16 {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        thread::spawn(move || {
            let words = Words::default();
            for stream in listener.incoming() {
                let (stream, words) = (stream.unwrap(), words.clone());
                thread::spawn(move || answer(stream, &words));
            }
        });
        port
    }

    fn answer(mut stream: TcpStream, words: &Words) -> Result<()> {
        fn number(stream: &mut TcpStream) -> Result<u64> {
            let mut number = [0; 8];
            stream.read_exact(&mut number)?;
            Ok(u64::from_le_bytes(number))
        }
        fn word(stream: &mut TcpStream) -> Result<Vec<u8>> {
            let mut word = vec![0; number(stream)? as usize];
            stream.read_exact(&mut word)?;
            Ok(word)
        }
        let mut greeting = [0; 5];
        stream.read_exact(&mut greeting)?;
        assert_eq!(greeting, [0, 0xCE, 0xF7, 0x85, 0x3C]);
        loop {
            let mut request = [0];
            stream.read_exact(&mut request)?;
            match request {
                [1] => {
                    let (key, value) = (word(&mut stream)?, word(&mut stream)?);
                    words.lock().unwrap().insert(key, value);
                }
                [3] => {
                    let key = word(&mut stream)?;
                    let value = words.lock().unwrap()[&key].clone();
                    stream.write_all(&(value.len() as u64).to_le_bytes())?;
                    stream.write_all(&value)?;
                }
                [5] => {
                    assert_eq!(number(&mut stream)?, 1);
                    let key = word(&mut stream)?;
                    let is_missing = !words.lock().unwrap().contains_key(&key);
                    stream.write_all(&[is_missing.into()])?;
                }
                other => panic!("{other:?}"),
            }
        }
    }
}
