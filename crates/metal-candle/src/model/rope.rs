//! Rotary position embeddings: the angles by which queries and keys are rotated.
//!
//! With a rotary width `d` (the head's width, or its first part) and pair `i` of `d/2`,
//!
//! ```text
//! inverse_frequency[i] = 1 / theta^(2i/d)
//! angle[position, i]   = position * inverse_frequency[i]
//! ```
//!
//! ([RoFormer](https://arxiv.org/abs/2104.09864)). A model that was stretched to a longer context
//! changes the inverse frequencies by one of [`RopeScaling`]'s rules. A pair is `(i, i + d/2)`, the
//! split-half layout of `transformers`.
//!
//! The inverse frequencies and the angles are rounded to f32 at the places where `transformers`
//! rounds them. At position 100 000 an angle in f32 is only known to 0.004, so an implementation
//! that is more exact than the one a model was trained with gives other logits.

use crate::{Error, Result};
use candle_core::{Device, Tensor};
use metal_candle_kernels::embedding;
use serde::Serialize;
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

/// How one or more layers of a model rotate their queries and keys.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// The base `theta` of the frequencies.
    pub theta: f64,
    /// The number of a head's leading elements that are rotated; even, at most the head's width.
    /// The others pass unchanged.
    pub rotary_dim: usize,
    /// The change made for a longer context.
    pub scaling: RopeScaling,
    /// A factor of the queries by their position.
    pub query_scaling: Option<QueryScaling>,
}

/// What rotated queries at position `p` are multiplied with, so that attention to a long text doesn't flatten:
/// `1 + beta · ln(1 + floor(p / original_max_position_embeddings))`, as Llama 4 and Ministral 3 have it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct QueryScaling {
    /// How fast the factor grows.
    pub beta: f64,
    /// The positions, from 0, whose factor is 1.
    pub original_max_position_embeddings: usize,
}

impl QueryScaling {
    /// The factor at `position`, with the roundings of `transformers`.
    fn factor(&self, position: u32) -> f32 {
        let periods = (position as f32 / self.original_max_position_embeddings as f32).floor();
        1.0 + self.beta as f32 * f64::from(1.0 + periods).ln() as f32
    }
}

/// A change of the inverse frequencies for a context longer than the one first trained on. It is written with the names
/// that a `config.json` has for it.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "rope_type", rename_all = "lowercase")]
pub enum RopeScaling {
    /// None.
    Default,
    /// Every frequency divided by `factor` ([position interpolation](https://arxiv.org/abs/2306.15595)).
    Linear {
        /// How many times longer the context became.
        factor: f64,
    },
    /// A base that grows with a text of more than `max_position_embeddings` tokens, `n` of them, and with it
    /// all wavelengths: `theta · (factor · n / max_position_embeddings - (factor - 1))^(d / (d - 2))`.
    Dynamic {
        /// How much the base grows.
        factor: f64,
        /// The context length before the stretch, in tokens.
        max_position_embeddings: usize,
    },
    /// Frequencies that turn more than `beta_fast` times in the original context stay, those that turn less
    /// than `beta_slow` times are divided by `factor`, and a linear blend by the pair's number lies between
    /// ([YaRN](https://arxiv.org/abs/2309.00071)).
    Yarn {
        /// How many times longer the context became.
        factor: f64,
        /// Turns in the original context above which a frequency stays.
        beta_fast: f64,
        /// Turns in the original context below which a frequency is divided by the whole factor.
        beta_slow: f64,
        /// Whether the bounds of the blend are widened to whole pairs.
        truncate: bool,
        /// The context length before the stretch, in tokens.
        original_max_position_embeddings: usize,
        /// What the cosines and sines are multiplied with.
        attention_factor: f64,
    },
    /// Llama 3.1's rule: wavelengths above `original_max_position_embeddings / low_freq_factor` are
    /// stretched by `factor`, those below `original_max_position_embeddings / high_freq_factor`
    /// stay, and a linear blend of both lies between.
    Llama3 {
        /// How many times longer the context became.
        factor: f64,
        /// Sets the wavelength above which everything is stretched.
        low_freq_factor: f64,
        /// Sets the wavelength below which nothing is stretched.
        high_freq_factor: f64,
        /// The context length before the stretch, in tokens.
        original_max_position_embeddings: usize,
    },
    /// One divisor a pair, of which there is a list for short and one for long texts
    /// ([LongRoPE](https://arxiv.org/abs/2402.13753)).
    LongRope {
        /// Divisors for texts of up to `original_max_position_embeddings` tokens; `rotary_dim / 2`.
        short_factor: Vec<f64>,
        /// Divisors for longer texts; `rotary_dim / 2`.
        long_factor: Vec<f64>,
        /// The context length before the stretch, in tokens.
        original_max_position_embeddings: usize,
        /// What the cosines and sines are multiplied with.
        attention_factor: f64,
    },
}

impl RopeConfig {
    /// The inverse frequencies, `(rotary_dim / 2,)` in radians a token, and the factor that
    /// belongs on the cosines and sines, for a text of `total_len` tokens.
    ///
    /// `total_len` counts everything the attention sees, with what is in a KV cache; that of a batch is its
    /// longest text's. It matters to LongRoPE, where keys cached under the short divisors do not fit a text
    /// that has grown beyond `original_max_position_embeddings`, and to dynamic rope, where those of a text
    /// beyond `max_position_embeddings` fit no other length: see [`Self::changes_between`].
    pub fn inverse_frequencies(&self, total_len: usize) -> (Vec<f32>, f64) {
        let dim = self.rotary_dim as f32;
        // The power is taken in f64 and rounded to f32, which is within the last bit of an f32
        // power function and does not depend on the platform's.
        let powers_of = |theta: f64| {
            (0..self.rotary_dim / 2)
                .map(move |pair| theta.powf(f64::from((2 * pair) as f32 / dim)) as f32)
        };
        let powers = powers_of(self.theta);
        match &self.scaling {
            RopeScaling::Default => (powers.map(|power| 1.0 / power).collect(), 1.0),
            RopeScaling::Linear { factor } => {
                (powers.map(|power| (1.0 / power) / *factor as f32).collect(), 1.0)
            }
            RopeScaling::Dynamic { factor, max_position_embeddings } => {
                if total_len <= *max_position_embeddings {
                    return (powers.map(|power| 1.0 / power).collect(), 1.0);
                }
                let stretch = *factor as f32 * total_len as f32 / *max_position_embeddings as f32
                    - (factor - 1.0) as f32;
                let width = self.rotary_dim as f64;
                let exponent = (width / (width - 2.0)) as f32;
                let growth = f64::from(stretch).powf(f64::from(exponent)) as f32;
                let theta = f64::from(self.theta as f32 * growth);
                (powers_of(theta).map(|power| 1.0 / power).collect(), 1.0)
            }
            RopeScaling::Yarn {
                factor,
                beta_fast,
                beta_slow,
                truncate,
                original_max_position_embeddings,
                attention_factor,
            } => {
                let (width, length) = (f64::from(dim), *original_max_position_embeddings as f64);
                // The pair, between others, that turns so many times.
                let pair = |turns: f64| {
                    width * (length / (turns * std::f64::consts::TAU)).ln()
                        / (2.0 * self.theta.ln())
                };
                let (mut low, mut high) = (pair(*beta_fast), pair(*beta_slow));
                if *truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                (low, high) = (low.max(0.0), high.min(width - 1.0));
                let span = if low == high { 0.001 } else { high - low };
                let frequencies = powers.enumerate().map(|(pair, power)| {
                    let divided = ((pair as f32 - low as f32) / span as f32).clamp(0.0, 1.0);
                    let kept = 1.0 - divided;
                    1.0 / (*factor as f32 * power) * (1.0 - kept) + 1.0 / power * kept
                });
                (frequencies.collect(), *attention_factor)
            }
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => {
                let length = *original_max_position_embeddings as f64;
                let longest = (length / low_freq_factor) as f32;
                let shortest = (length / high_freq_factor) as f32;
                let stretch = |frequency: f32| {
                    let wavelength = std::f64::consts::TAU as f32 / frequency;
                    if wavelength > longest {
                        frequency / *factor as f32
                    } else if wavelength < shortest {
                        frequency
                    } else {
                        let blend = (length as f32 / wavelength - *low_freq_factor as f32)
                            / (high_freq_factor - low_freq_factor) as f32;
                        (1.0 - blend) * frequency / *factor as f32 + blend * frequency
                    }
                };
                (powers.map(|power| stretch(1.0 / power)).collect(), 1.0)
            }
            RopeScaling::LongRope {
                short_factor,
                long_factor,
                original_max_position_embeddings,
                attention_factor,
            } => {
                let long = total_len > *original_max_position_embeddings;
                let divisors = if long { long_factor } else { short_factor };
                let frequencies = powers
                    .zip(divisors)
                    .map(|(power, divisor)| 1.0 / (*divisor as f32 * power))
                    .collect();
                (frequencies, *attention_factor)
            }
        }
    }

    /// Whether a text of `a` and one of `b` tokens have different inverse frequencies, so that keys
    /// rotated for one do not fit the other.
    pub fn changes_between(&self, a: usize, b: usize) -> bool {
        match &self.scaling {
            RopeScaling::LongRope { original_max_position_embeddings, .. } => {
                (a > *original_max_position_embeddings) != (b > *original_max_position_embeddings)
            }
            RopeScaling::Dynamic { max_position_embeddings: max, .. } => a.max(*max) != b.max(*max),
            RopeScaling::Default
            | RopeScaling::Linear { .. }
            | RopeScaling::Yarn { .. }
            | RopeScaling::Llama3 { .. } => false,
        }
    }

    /// The cosines and sines of the angles at `positions`, each `(positions, rotary_dim / 2)` in
    /// row-major order, with the attention factor multiplied in. `total_len` is as for
    /// [`Self::inverse_frequencies`].
    pub fn cos_sin(&self, positions: &[u32], total_len: usize) -> (Vec<f32>, Vec<f32>) {
        let (frequencies, factor) = self.inverse_frequencies(total_len);
        let factor = factor as f32;
        positions
            .iter()
            .flat_map(|position| frequencies.iter().map(move |f| *position as f32 * f))
            .map(|angle| {
                // The angle is an f32; its cosine is taken in f64 to be right to the last bit.
                let (sin, cos) = f64::from(angle).sin_cos();
                (cos as f32 * factor, sin as f32 * factor)
            })
            .unzip()
    }
}

/// The angles of one rope in a forward pass, as cosines and sines of `(batch, seq, rotary_dim / 2)`.
#[derive(Clone, Debug)]
pub(crate) struct Rotation {
    pub cos: Tensor,
    pub sin: Tensor,
    /// Those of the queries, where they are scaled by their position.
    pub queries: Option<(Tensor, Tensor)>,
}

/// Cosines and sines of the first positions of a model's ropes on its device. They are made when they
/// are first asked for, and again, longer, when a text needs more.
#[derive(Debug, Default)]
pub(crate) struct RopeTables(Mutex<HashMap<usize, Table>>);

#[derive(Debug)]
struct Table {
    /// `(positions, rotary_dim / 2)`
    cos: Tensor,
    sin: Tensor,
    /// Both, times the queries' factors.
    queries: Option<(Tensor, Tensor)>,
    positions: usize,
    /// The length of a text that they are right for.
    total_len: usize,
}

impl Table {
    fn new(rope: &RopeConfig, positions: usize, total_len: usize, device: &Device) -> Result<Self> {
        // A shorter table than asked for would be taken for a whole one ever after.
        let end = u32::try_from(positions).map_err(candle_core::Error::wrap)?;
        let places: Vec<u32> = (0..end).collect();
        let (cos, sin) = rope.cos_sin(&places, total_len);
        let width = cos.len() / positions;
        let tensor = |values| Tensor::from_vec(values, (positions, width), device);
        let queries = rope.query_scaling.map(|scaling| {
            let scaled = |values: &[f32]| {
                let rows = values.chunks_exact(width).zip(&places);
                let values = rows.flat_map(|(row, &position)| {
                    let factor = scaling.factor(position);
                    row.iter().map(move |value| value * factor)
                });
                tensor(values.collect())
            };
            Ok::<_, Error>((scaled(&cos)?, scaled(&sin)?))
        });
        let queries = queries.transpose()?;
        Ok(Self { cos: tensor(cos)?, sin: tensor(sin)?, queries, positions, total_len })
    }
}

impl RopeTables {
    /// The cosines and sines of the rope `index` at `positions` `(batch, seq)` u32, which are below
    /// `total_len`. That is as for [`RopeConfig::inverse_frequencies`].
    pub(crate) fn cos_sin(
        &self,
        index: usize,
        rope: &RopeConfig,
        positions: &Tensor,
        total_len: usize,
    ) -> Result<Rotation> {
        const FEWEST: usize = 512;
        let mut tables = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |table: &&Table| {
            table.positions >= total_len && !rope.changes_between(table.total_len, total_len)
        };
        if tables.get(&index).filter(fits).is_none() {
            let count = total_len.next_power_of_two().max(FEWEST);
            tables.insert(index, Table::new(rope, count, total_len, positions.device())?);
        }
        let Some(table) = tables.get(&index) else {
            return Err(Error::option("rope", "has no table"));
        };
        let at = |table: &Tensor| embedding::forward(table, positions);
        // Up to the original length, all factors are 1.
        let scaled = rope
            .query_scaling
            .is_some_and(|scaling| total_len > scaling.original_max_position_embeddings);
        let queries = table.queries.as_ref().filter(|_| scaled);
        let queries = queries.map(|(cos, sin)| Ok::<_, Error>((at(cos)?, at(sin)?))).transpose()?;
        Ok(Rotation { cos: at(&table.cos)?, sin: at(&table.sin)?, queries })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_as_many_positions_as_asked_for() {
        let rope = rope(10_000.0, RopeScaling::Default);
        let table = Table::new(&rope, 512, 3, &Device::Cpu).unwrap();
        assert_eq!((table.positions, table.cos.dims()), (512, &[512, 8][..]));
        assert!(Table::new(&rope, 1 << 32, 3, &Device::Cpu).is_err());
    }

    #[test]
    fn a_scaling_is_written_as_a_config_has_it() {
        let yarn = RopeScaling::Yarn {
            factor: 4.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            truncate: true,
            original_max_position_embeddings: 4096,
            attention_factor: 1.0,
        };
        let json = serde_json::to_value(&yarn).unwrap();
        assert_eq!(json["rope_type"], "yarn");
        assert_eq!(json["factor"], 4.0);
        assert_eq!(json["original_max_position_embeddings"], 4096);
        let word = |scaling| serde_json::to_value(scaling).unwrap()["rope_type"].clone();
        assert_eq!(word(RopeScaling::Default), "default");
        let longrope = RopeScaling::LongRope {
            short_factor: vec![1.0],
            long_factor: vec![2.0],
            original_max_position_embeddings: 4096,
            attention_factor: 1.0,
        };
        assert_eq!(word(longrope), "longrope");
        let queries = QueryScaling { beta: 0.1, original_max_position_embeddings: 8192 };
        let expected = serde_json::json!({"beta": 0.1, "original_max_position_embeddings": 8192});
        assert_eq!(serde_json::to_value(queries).unwrap(), expected);
    }

    // The expected values are what transformers 5.23 computes with torch on the CPU, printed as
    // the shortest decimal of the f64 that equals the f32.

    fn assert_close(found: &[f32], expected: &[f64], tolerance: f64) {
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            let difference = (f64::from(*found) - expected).abs();
            assert!(difference <= tolerance * expected.abs(), "{found} is not {expected}");
        }
    }

    fn rope(theta: f64, scaling: RopeScaling) -> RopeConfig {
        RopeConfig { theta, rotary_dim: 16, scaling, query_scaling: None }
    }

    fn llama3() -> RopeConfig {
        RopeConfig {
            theta: 500_000.0,
            rotary_dim: 16,
            scaling: RopeScaling::Llama3 {
                factor: 32.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_max_position_embeddings: 8192,
            },
            query_scaling: None,
        }
    }

    fn longrope() -> RopeConfig {
        RopeConfig {
            theta: 10_000.0,
            rotary_dim: 12,
            scaling: RopeScaling::LongRope {
                short_factor: vec![1.0, 1.02, 1.1, 1.25, 1.5, 2.0],
                long_factor: vec![1.05, 1.5, 3.25, 9.5, 23.0, 40.7],
                original_max_position_embeddings: 4096,
                attention_factor: 1.1902380714238083,
            },
            query_scaling: None,
        }
    }

    #[test]
    fn inverse_frequencies_are_those_of_transformers() {
        let default = rope(500_000.0, RopeScaling::Default);
        let expected = [
            1.0,
            0.193922758102417,
            0.03760603070259094,
            0.00729266507551074,
            0.001414213445968926,
            0.00027424818836152554,
            5.3182957344688475e-05,
            1.0313385246263351e-05,
        ];
        assert_close(&default.inverse_frequencies(1).0, &expected, 1e-7);

        let linear = rope(10_000.0, RopeScaling::Linear { factor: 8.0 });
        let expected = [
            0.125,
            0.03952847048640251,
            0.012500000186264515,
            0.0039528473280370235,
            0.0012499999720603228,
            0.00039528473280370235,
            0.0001250000059371814,
            3.9528473280370235e-05,
        ];
        assert_close(&linear.inverse_frequencies(1).0, &expected, 1e-7);

        let expected = [
            1.0,
            0.193922758102417,
            0.03760603070259094,
            0.00729266507551074,
            0.000429556705057621,
            8.570255886297673e-06,
            1.6619674170215148e-06,
            3.2229328894572973e-07,
        ];
        assert_close(&llama3().inverse_frequencies(1).0, &expected, 1e-7);
    }

    #[test]
    fn yarn_divides_the_frequencies_by_how_often_they_turn() {
        let yarn = |factor, (beta_fast, beta_slow, truncate), length| RopeScaling::Yarn {
            factor,
            beta_fast,
            beta_slow,
            truncate,
            original_max_position_embeddings: length,
            attention_factor: 1.138629436111989,
        };
        // As Qwen 2.5 has it.
        let qwen = rope(1e6, yarn(4.0, (32.0, 1.0, true), 32768));
        let expected = [
            1.0,
            0.17782793939113617,
            0.03162277862429619,
            0.004217559937387705,
            0.0005000000237487257,
            4.4456985051510856e-05,
            7.905693564680405e-06,
            1.405853367941745e-06,
        ];
        let (found, factor) = qwen.inverse_frequencies(1);
        assert_close(&found, &expected, 2e-7);
        assert_eq!(factor, 1.138629436111989);
        assert!(!qwen.changes_between(1, 100_000));

        let between = rope(100.0, yarn(4.0, (2.0, 0.5, false), 16));
        let expected = [
            1.0,
            0.46070271730422974,
            0.16058915853500366,
            0.04445698484778404,
            0.02500000037252903,
            0.014058532193303108,
            0.007905694656074047,
            0.004445698577910662,
        ];
        assert_close(&between.inverse_frequencies(1).0, &expected, 2e-7);
    }

    #[test]
    fn dynamic_rope_has_a_larger_base_for_every_longer_text() {
        let scaling = RopeScaling::Dynamic { factor: 2.0, max_position_embeddings: 4096 };
        let dynamic = rope(10_000.0, scaling);
        let default = rope(10_000.0, RopeScaling::Default);
        assert_eq!(dynamic.inverse_frequencies(4096), default.inverse_frequencies(4096));
        let expected = [
            1.0,
            0.3162057101726532,
            0.09998606145381927,
            0.03161616250872612,
            0.009997211396694183,
            0.003161175176501274,
            0.0009995817672461271,
            0.0003160734486300498,
        ];
        assert_close(&dynamic.inverse_frequencies(4097).0, &expected, 4e-7);
        let expected = [
            1.0,
            0.26051709055900574,
            0.0678691565990448,
            0.017681075260043144,
            0.00460622226819396,
            0.001199999707750976,
            0.00031262042466551065,
            8.144295861711726e-05,
        ];
        assert_close(&dynamic.inverse_frequencies(10_000).0, &expected, 4e-7);
        assert!(!dynamic.changes_between(0, 4096));
        assert!(dynamic.changes_between(4096, 4097) && dynamic.changes_between(4097, 4098));
        assert!(dynamic.changes_between(5000, 17));
    }

    #[test]
    fn queries_are_scaled_by_how_often_their_position_exceeds_the_original_length() {
        let scaling = QueryScaling { beta: 0.1, original_max_position_embeddings: 16384 };
        let found = [0, 16383, 16384, 32768, 262_143].map(|position| scaling.factor(position));
        let expected = [1.0, 1.0, 1.06931471824646, 1.1098612546920776, 1.2772588729858398];
        assert_close(&found, &expected, 1e-7);
    }

    #[test]
    fn the_tables_of_queries_are_those_of_keys_times_the_factor() {
        let values = |x: &Tensor| x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let scaling = QueryScaling { beta: 0.5, original_max_position_embeddings: 8 };
        let rope = RopeConfig { query_scaling: Some(scaling), ..llama3() };
        let positions = Tensor::new(&[[3u32, 7, 8, 20]], &Device::Cpu).unwrap();
        let tables = RopeTables::default();
        let rotation = tables.cos_sin(0, &rope, &positions, 21).unwrap();
        let (cos, sin) = rotation.queries.unwrap();
        for (queries, keys) in [(cos, rotation.cos), (sin, rotation.sin)] {
            assert_eq!(queries.dims(), [1, 4, 8]);
            let rows = values(&queries).into_iter().zip(values(&keys)).enumerate();
            for (index, (query, key)) in rows {
                let factor = scaling.factor([3, 7, 8, 20][index / 8]);
                assert_eq!(query, key * factor, "{index}");
            }
        }
        // The factors of a text as long as the original context are all 1.
        let positions = Tensor::new(&[[3u32, 7]], &Device::Cpu).unwrap();
        assert!(tables.cos_sin(0, &rope, &positions, 8).unwrap().queries.is_none());
        assert!(tables.cos_sin(1, &llama3(), &positions, 21).unwrap().queries.is_none());
    }

    #[test]
    fn longrope_changes_its_divisors_beyond_the_original_length() {
        let rope = longrope();
        let (short, factor) = rope.inverse_frequencies(4096);
        let expected = [
            1.0,
            0.21121908724308014,
            0.042196255177259445,
            0.00800000037997961,
            0.0014362895162776113,
            0.00023207947378978133,
        ];
        assert_close(&short, &expected, 2e-7);
        assert_eq!(factor, 1.1902380714238083);
        let (long, factor) = rope.inverse_frequencies(4097);
        let expected = [
            0.9523810148239136,
            0.14362896978855133,
            0.014281810261309147,
            0.0010526315309107304,
            9.367105667479336e-05,
            1.140439690061612e-05,
        ];
        assert_close(&long, &expected, 2e-7);
        assert_eq!(factor, 1.1902380714238083);
        assert!(rope.changes_between(4096, 4097) && !rope.changes_between(1, 4096));
        assert!(!llama3().changes_between(1, 100_000));
    }

    #[test]
    fn cosines_and_sines_match_transformers_at_long_positions() {
        let (cos, sin) = llama3().cos_sin(&[0, 77_777, 131_071], 131_072);
        assert_eq!((&cos[..8], &sin[..8]), (&[1.0f32; 8][..], &[0.0f32; 8][..]));
        let expected_cos = [
            -0.8305649161338806,
            -0.998440146446228,
            -0.998108446598053,
            -0.14362670481204987,
            -0.41041651368141174,
            0.7859477400779724,
            0.9916571974754333,
            0.9996858239173889,
            -0.8179835081100464,
            -0.5605309009552002,
            -0.9951217770576477,
            0.687491774559021,
            0.9698352217674255,
            0.43269893527030945,
            0.9763674736022949,
            0.9991078972816467,
        ];
        for (found, expected) in cos[8..].iter().zip(expected_cos) {
            assert!((f64::from(*found) - expected).abs() < 1e-6, "{found} is not {expected}");
        }
        let expected_sin = [-0.5569218397140503, 0.055832087993621826, -0.061478059738874435];
        for (found, expected) in sin[8..].iter().zip(expected_sin) {
            assert!((f64::from(*found) - expected).abs() < 1e-6, "{found} is not {expected}");
        }
    }

    #[test]
    fn the_attention_factor_is_in_the_cosines_and_sines() {
        let (cos, sin) = longrope().cos_sin(&[4095], 4096);
        let expected_cos = [
            -0.07852714508771896,
            -0.6389174461364746,
            -1.1902161836624146,
            0.26754575967788696,
            1.0955482721328735,
            0.6919875144958496,
        ];
        let expected_sin = [
            -1.1876448392868042,
            -1.0042167901992798,
            -0.007230302784591913,
            1.1597784757614136,
            -0.4652317464351654,
            0.9684110879898071,
        ];
        for (found, expected) in
            cos.iter().chain(&sin).zip(expected_cos.into_iter().chain(expected_sin))
        {
            assert!((f64::from(*found) - expected).abs() < 1e-6, "{found} is not {expected}");
        }
    }
}
