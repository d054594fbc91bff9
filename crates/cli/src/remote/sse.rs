//! Server-sent events, as the HTML standard has them, of which the data alone matter here.

use metal_candle::files::BYTE_ORDER_MARK;

/// Bytes of one event, at most.
const MOST: usize = 16 << 20;

/// Takes a stream's bytes, cut anywhere, and gives the data of its events.
#[derive(Debug, Default)]
pub struct Events {
    line: Vec<u8>,
    /// The lines of the event so far, with their ends.
    data: String,
    has_data: bool,
    /// The last byte was a carriage return, so that a line feed now belongs to it.
    returned: bool,
    begun: bool,
}

impl Events {
    /// The data of the events that these bytes end; an error for an event that never ends.
    pub fn push(&mut self, bytes: &[u8]) -> Result<Vec<String>, String> {
        let mut events = Vec::new();
        for byte in bytes {
            match byte {
                b'\n' if std::mem::take(&mut self.returned) => {}
                b'\n' | b'\r' => {
                    self.returned = *byte == b'\r';
                    events.extend(self.end_line());
                }
                _ => {
                    self.returned = false;
                    self.line.push(*byte);
                }
            }
            if self.line.len() + self.data.len() > MOST {
                return Err(format!("an event is longer than {} MiB", MOST >> 20));
            }
        }
        Ok(events)
    }

    fn end_line(&mut self) -> Option<String> {
        let bytes = std::mem::take(&mut self.line);
        let line = String::from_utf8_lossy(&bytes);
        let line = match std::mem::replace(&mut self.begun, true) {
            true => &*line,
            false => line.strip_prefix(BYTE_ORDER_MARK).unwrap_or(&line),
        };
        if line.is_empty() {
            let data = std::mem::take(&mut self.data);
            return std::mem::take(&mut self.has_data)
                .then(|| data.strip_suffix('\n').unwrap_or(&data).to_string());
        }
        let (field, value) = line.split_once(':').unwrap_or((line, ""));
        if field == "data" {
            self.data.push_str(value.strip_prefix(' ').unwrap_or(value));
            self.data.push('\n');
            self.has_data = true;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_the_same_wherever_they_are_cut() {
        let stream = "\u{feff}data: one\n\n: a comment\n\nevent: x\nid: 3\ndata:two\r\ndata\r\ndata:  lines\r\n\r\n\
                      data: naïve 日本\r\rdata\n\ndata: [DONE]\n\ndata: never ended\n";
        let expected = ["one", "two\n\n lines", "naïve 日本", "", "[DONE]"];
        for size in 1..stream.len() {
            let mut events = Events::default();
            let pieces = stream.as_bytes().chunks(size);
            let found: Vec<String> = pieces.flat_map(|piece| events.push(piece).unwrap()).collect();
            assert_eq!(found, expected, "{size}");
        }
    }

    #[test]
    fn an_event_without_an_end_is_refused() {
        let mut events = Events::default();
        let piece = [b'x'; 1 << 20];
        let refused = (0..20).find_map(|_| events.push(&piece).err());
        assert!(refused.unwrap().contains("16 MiB"));
        let mut events = Events::default();
        let lines = b"data: x\n".repeat(1 << 17);
        assert!((0..80).any(|_| events.push(&lines).is_err()));
    }
}
