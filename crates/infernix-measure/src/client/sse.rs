//! Server-sent events: the part of the format that model servers use.

use std::io::{self, BufRead};

/// Longest line taken. A server that sends more is broken, and must not fill the memory of the one who measures it.
const MAX_LINE: usize = 16 << 20;

/// Reads the data of one event after another from a stream.
pub struct Events<R> {
    reader: R,
}

impl<R: BufRead> Events<R> {
    /// Of a response body.
    pub fn new(reader: R) -> Self {
        Self { reader }
    }

    /// Data of the next event, its lines joined by line feeds; `None` at the end of the stream. Comments, ids, retry
    /// times and event names are skipped, as is an event without data. An event that the stream's end cuts off is
    /// an error.
    ///
    /// # Errors
    /// What the reader reports; a line that is too long or no UTF-8; an unfinished event.
    pub fn next_data(&mut self) -> io::Result<Option<String>> {
        let mut data: Option<String> = None;
        loop {
            let Some(line) = self.line()? else {
                return match data {
                    None => Ok(None),
                    Some(_) => {
                        Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the stream ends inside an event"))
                    }
                };
            };
            if line.is_empty() {
                if data.is_some() {
                    return Ok(data);
                }
                continue;
            }
            let Some(rest) = line.strip_prefix("data:") else { continue };
            let rest = rest.strip_prefix(' ').unwrap_or(rest);
            match &mut data {
                None => data = Some(rest.to_owned()),
                Some(d) => {
                    d.push('\n');
                    d.push_str(rest);
                }
            }
        }
    }

    fn line(&mut self) -> io::Result<Option<String>> {
        let mut line = Vec::new();
        loop {
            let available = self.reader.fill_buf()?;
            if available.is_empty() {
                break;
            }
            let end = available.iter().position(|b| *b == b'\n');
            let taken = end.map_or(available.len(), |e| e + 1);
            line.extend_from_slice(&available[..taken]);
            self.reader.consume(taken);
            if end.is_some() {
                break;
            }
            if line.len() > MAX_LINE {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "a line of the stream exceeds 16 MiB",
                ));
            }
        }
        if line.is_empty() {
            return Ok(None);
        }
        while matches!(line.last(), Some(b'\n' | b'\r')) {
            line.pop();
        }
        String::from_utf8(line)
            .map(Some)
            .map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "the stream is no UTF-8"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(text: &str, piece: usize) -> io::Result<Vec<String>> {
        let mut events = Events::new(io::BufReader::with_capacity(piece, text.as_bytes()));
        let mut out = Vec::new();
        while let Some(data) = events.next_data()? {
            out.push(data);
        }
        Ok(out)
    }

    #[test]
    fn events_are_the_same_in_pieces_of_any_size() {
        let text = ": keep-alive\n\nevent: x\ndata: {\"a\":1}\r\n\r\nid: 7\n\ndata:two\ndata: lines\n\ndata: [DONE]\n\n";
        for piece in [1, 2, 3, 7, 64, 4096] {
            assert_eq!(all(text, piece).unwrap(), ["{\"a\":1}", "two\nlines", "[DONE]"], "pieces of {piece}");
        }
    }

    #[test]
    fn a_stream_cut_inside_an_event_is_an_error_and_not_its_end() {
        assert!(all("data: one\n\ndata: tw", 8).is_err());
        assert!(all("data: one\n\n", 8).is_ok());
    }
}
