//! What the routes of files and jobs read of a request beside its body: identifiers in the path, and pages of lists.

use crate::body::parse;
use crate::error::{ApiError, Result};
use axum::body::Bytes;
use axum::extract::{FromRequest, FromRequestParts, Path, Request};
use axum::http::request::Parts;
use serde::Deserialize;
use std::ops::RangeInclusive;

/// The identifier in a path. It is looked up, never used as a path.
pub(super) struct Id(pub String);

impl<S: Send + Sync> FromRequestParts<S> for Id {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self> {
        let read = Path::<String>::from_request_parts(parts, state).await;
        read.map(|Path(id)| Self(id)).map_err(|error| ApiError::invalid(error.body_text()))
    }
}

/// A request that says all in its path: it has no body, or an empty object. It is read to its end, as a connection with
/// an unread body could not be used again.
pub(super) struct NoBody;

/// An object without fields.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Nothing {}

impl<S: Send + Sync> FromRequest<S> for NoBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self> {
        let bytes = Bytes::from_request(request, state).await;
        let bytes = bytes.map_err(|error| {
            let kind = "invalid_request_error";
            ApiError::new(error.status(), kind, "expected no body, or an empty object")
        })?;
        match bytes.is_empty() {
            true => Ok(Self),
            false => parse::<Nothing>(&bytes).map(|_| Self),
        }
    }
}

/// A query as pairs of names and values.
pub(super) type Pairs = Vec<(String, String)>;

/// A part of a list that is asked for.
#[derive(Debug, PartialEq)]
pub(super) struct Paging {
    /// The last one that is known.
    pub after: Option<String>,
    pub limit: usize,
}

impl Paging {
    /// Reads `after` and `limit`, and gives the other pairs.
    ///
    /// # Errors
    /// A 400 for a limit out of its range.
    pub fn read(pairs: Pairs, usual: usize, range: RangeInclusive<usize>) -> Result<(Self, Pairs)> {
        let mut paging = Self { after: None, limit: usual };
        let mut others = Vec::new();
        for (name, value) in pairs {
            match name.as_str() {
                "after" if value.is_empty() => {}
                "after" => paging.after = Some(value),
                "limit" => {
                    let limit = value.parse().ok().filter(|limit| range.contains(limit));
                    paging.limit = limit.ok_or_else(|| {
                        let found = metal_candle::readable(&value).into_owned();
                        ApiError::field(
                            "limit",
                            format_args!(
                                "is {found:?}, expected a whole number from {} to {}",
                                range.start(),
                                range.end()
                            ),
                        )
                    })?;
                }
                _ => others.push((name, value)),
            }
        }
        Ok((paging, others))
    }

    /// [`Self::read`] of a query that has nothing else.
    ///
    /// # Errors
    /// As [`Self::read`], and a 400 for other names.
    pub fn read_all(pairs: Pairs, usual: usize, range: RangeInclusive<usize>) -> Result<Self> {
        let (paging, others) = Self::read(pairs, usual, range)?;
        match others.first() {
            None => Ok(paging),
            Some((name, _)) => Err(unknown(name)),
        }
    }

    /// That `after` names nothing that is there.
    pub fn lost(&self, what: &str) -> ApiError {
        let after = self.after.as_deref().unwrap_or_default();
        let after = metal_candle::readable(after);
        ApiError::field("after", format_args!("is {after:?}, and there is no such {what}"))
    }
}

/// That a query has a name that nobody reads.
pub(super) fn unknown(name: &str) -> ApiError {
    let shown = metal_candle::readable(name).into_owned();
    ApiError::field(shown, "is not known here")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(query: &[(&str, &str)]) -> Pairs {
        query.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect()
    }

    #[test]
    fn pages_are_bounded_and_unknown_names_are_told() {
        let read = |query: &[(&str, &str)]| Paging::read_all(pairs(query), 20, 1..=100);
        assert_eq!(read(&[]).unwrap(), Paging { after: None, limit: 20 });
        let paging = read(&[("after", "file-a"), ("limit", "100")]).unwrap();
        assert_eq!(paging, Paging { after: Some("file-a".into()), limit: 100 });
        for wrong in ["0", "101", "-1", "x", "", "1e2", "99999999999999999999"] {
            let error = read(&[("limit", wrong)]).unwrap_err();
            assert_eq!(error.param.as_deref(), Some("limit"), "{wrong}");
        }
        assert_eq!(read(&[("order", "asc")]).unwrap_err().param.as_deref(), Some("order"));
        let (_, others) = Paging::read(pairs(&[("a", "b"), ("limit", "1")]), 20, 1..=1).unwrap();
        assert_eq!(others, pairs(&[("a", "b")]));
    }
}
