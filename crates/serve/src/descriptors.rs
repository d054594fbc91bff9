//! How many connections there is room for: each is a descriptor, of which a process may have few.

#[cfg(unix)]
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Descriptors for files, the database and threads, beside those of connections; half of all where there are few.
#[cfg(unix)]
const OTHERS: u64 = 256;

/// How many connections there may be at once. The process's limit is raised, as far as the system allows, to twice as
/// many as requests may be under way: the others are told that they are too many, or wait for their next request.
pub fn connections(requests: usize) -> usize {
    #[cfg(unix)]
    {
        let requests = requests as u64;
        let needed = requests.saturating_mul(2).saturating_add(OTHERS);
        let Some(allowed) = raised(getrlimit(Resource::Nofile), needed) else { return usize::MAX };
        let room = room(allowed);
        if room < requests {
            tracing::warn!(
                "there is room for {room} connections, where {requests} requests may be under way: raise the limit of \
                 open files (ulimit -n, LimitNOFILE), which is {allowed}"
            );
        }
        usize::try_from(room).unwrap_or(usize::MAX)
    }
    #[cfg(not(unix))]
    requests.saturating_mul(2)
}

/// Descriptors for connections among this many.
#[cfg(unix)]
fn room(allowed: u64) -> u64 {
    allowed - OTHERS.min(allowed / 2)
}

/// The limit once it is raised to what is needed, as far as may be; `None` where there is none.
#[cfg(unix)]
fn raised(found: Rlimit, needed: u64) -> Option<u64> {
    let current = found.current?;
    let most = found.maximum.map_or(needed, |maximum| maximum.min(needed));
    if current >= most {
        return Some(current);
    }
    let raised = Rlimit { current: Some(most), maximum: found.maximum };
    match setrlimit(Resource::Nofile, raised) {
        Ok(()) => Some(most),
        Err(error) => {
            tracing::warn!("the limit of open files stays at {current}: {error}");
            Some(current)
        }
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn some_descriptors_are_kept_from_connections() {
        assert_eq!((room(64), room(1024), room(2304)), (32, 768, 2048));
        // Whatever the limit is, there is room for one.
        assert!(connections(1) >= 1);
    }
}
