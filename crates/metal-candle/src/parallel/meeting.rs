//! How ranks without MPI find each other: at rank 0's address, or by the store of `torchrun`'s agent, which has that
//! address for itself.

use super::elsewhere;
use super::launcher::Meeting;
use super::tcp::Star;
use super::torch_store::Store;
use crate::{Error, Result};
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv6Addr, TcpListener};
use std::time::Duration;

/// The key in the store under which rank 0 says its port, before the word of this start.
const KEY: &str = "metal-candle/";

/// Finds the other ranks.
pub(super) fn meet(meeting: &Meeting, rank: usize, size: usize, limit: Duration) -> Result<Star> {
    let Meeting { address, is_store, word } = meeting;
    let (host, port) = address;
    let failed = |error: std::io::Error| {
        let message = format!(
            "the ranks cannot meet at {host}:{port} (MASTER_ADDR and MASTER_PORT): {error}"
        );
        Error::Rank { rank: 0, message }
    };
    let mut store = match is_store {
        true => Some(Store::connect(address, limit).map_err(failed)?),
        false => None,
    };
    let key = format!("{KEY}{word}");
    if rank == 0 {
        let listener = listen(host, if *is_store { 0 } else { *port }).map_err(failed)?;
        if let Some(store) = &mut store {
            let port = listener.local_addr().map_err(failed)?.port();
            store.set(&key, port.to_string().as_bytes()).map_err(failed)?;
        }
        return Star::of_root(&listener, size, word, limit);
    }
    let port = match &mut store {
        None => *port,
        Some(store) => {
            let said = store.wait(&key, limit).map_err(failed)?;
            let port = std::str::from_utf8(&said).ok().and_then(|said| said.parse().ok());
            port.ok_or_else(|| elsewhere(0, "the start"))?
        }
    };
    Star::of_other(&(host.clone(), port), rank, size, word, limit)
}

/// Listens at a name of this machine, or everywhere where the name is not its own, as a service's is.
fn listen(host: &str, port: u16) -> std::io::Result<TcpListener> {
    match TcpListener::bind((host, port)) {
        Err(error) if error.kind() == ErrorKind::AddrNotAvailable => {
            TcpListener::bind((IpAddr::V6(Ipv6Addr::UNSPECIFIED), port))
        }
        bound => bound,
    }
}

#[cfg(test)]
mod tests {
    use super::super::torch_store::tests::serve;
    use super::*;
    use std::thread;

    const LIMIT: Duration = Duration::from_secs(30);

    /// What three ranks gather that meet so.
    fn gathered(meeting: &Meeting) -> Vec<Vec<Vec<u8>>> {
        let ranks: Vec<_> = (0..3)
            .map(|rank| {
                let meeting = meeting.clone();
                thread::spawn(move || {
                    let star = meet(&meeting, rank, 3, LIMIT).unwrap();
                    assert_eq!((star.rank(), star.size()), (rank, 3));
                    let found = star.gather("the ranks", &[rank as u8]).unwrap();
                    // Rank 0 ends first.
                    if rank > 0 {
                        star.outlast_root(LIMIT);
                    }
                    found
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    }

    #[test]
    fn ranks_meet_at_an_address_or_by_a_store() {
        let free = TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port();
        for (port, is_store) in [(free, false), (serve(), true)] {
            let address = ("localhost".to_string(), port);
            let meeting = Meeting { address, is_store, word: "a start".into() };
            assert_eq!(gathered(&meeting), vec![vec![vec![0], vec![1], vec![2]]; 3]);
        }
    }

    #[test]
    fn nobody_there_is_told_with_the_address() {
        let free = TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port();
        for (rank, is_store) in [(1, false), (0, true)] {
            let address = ("127.0.0.1".to_string(), free);
            let meeting = Meeting { address, is_store, word: String::new() };
            let error = meet(&meeting, rank, 2, Duration::from_millis(200)).unwrap_err();
            let told = error.to_string();
            assert!(told.contains(&format!("127.0.0.1:{free}")), "{told}");
        }
        let address = ("127.0.0.1".to_string(), serve());
        let meeting = Meeting { address, is_store: true, word: String::new() };
        let error = meet(&meeting, 1, 2, Duration::from_millis(200)).unwrap_err();
        assert!(error.to_string().contains("nobody has set"), "{error}");
    }
}
