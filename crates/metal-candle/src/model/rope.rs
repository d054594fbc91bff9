//! Rotary position embeddings: the angles by which queries and keys are turned.
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

/// How one or more layers of a model turn their queries and keys.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// The base `theta` of the frequencies.
    pub theta: f64,
    /// The number of a head's leading elements that are turned; even, at most the head's width.
    /// The others pass unchanged.
    pub rotary_dim: usize,
    /// The change made for a longer context.
    pub scaling: RopeScaling,
}

/// A change of the inverse frequencies for a context longer than the one first trained on.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// None.
    Default,
    /// Every frequency divided by `factor` ([position interpolation](https://arxiv.org/abs/2306.15595)).
    Linear {
        /// How many times longer the context became.
        factor: f64,
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
    /// `total_len` counts everything the attention sees, with what is in a KV cache. It matters to
    /// LongRoPE alone, where keys cached under the short divisors do not fit a text that has grown
    /// beyond `original_max_position_embeddings`: see [`Self::changes_between`].
    pub fn inverse_frequencies(&self, total_len: usize) -> (Vec<f32>, f64) {
        let dim = self.rotary_dim as f32;
        // The power is taken in f64 and rounded to f32, which is within the last bit of an f32
        // power function and does not depend on the platform's.
        let powers = (0..self.rotary_dim / 2)
            .map(|pair| self.theta.powf(f64::from((2 * pair) as f32 / dim)) as f32);
        match &self.scaling {
            RopeScaling::Default => (powers.map(|power| 1.0 / power).collect(), 1.0),
            RopeScaling::Linear { factor } => {
                (powers.map(|power| (1.0 / power) / *factor as f32).collect(), 1.0)
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
    /// turned for one do not fit the other.
    pub fn changes_between(&self, a: usize, b: usize) -> bool {
        match &self.scaling {
            RopeScaling::LongRope { original_max_position_embeddings, .. } => {
                (a > *original_max_position_embeddings) != (b > *original_max_position_embeddings)
            }
            RopeScaling::Default | RopeScaling::Linear { .. } | RopeScaling::Llama3 { .. } => false,
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
