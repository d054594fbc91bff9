//! What the loss of a model in f16 is multiplied by for the backward pass, so that gradients between layers, which are in
//! the model's dtype, don't vanish (Micikevicius et al., "Mixed Precision Training", 2018): f16 has no numbers below 6e-8.
//!
//! How much that has to be depends on the model, on the loss and on the tokens of a step, so it is found out, as by
//! PyTorch's `GradScaler`: the scale doubles after 2000 updates, and becomes a sixteenth once a gradient goes beyond f16.

use candle_core::DType;

/// Powers of two: of the scale at first, of what it is divided by, and of the largest one.
const FIRST: i32 = 10;
const BACKOFF: i32 = 4;
const LARGEST: i32 = 24;
/// After how many updates without a change the scale doubles.
const GROWS_AFTER: u64 = 2000;

/// How the scale came to be what it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct LossScale {
    /// How often it was lowered.
    pub overflows: i32,
    /// How often it was doubled.
    pub doublings: i32,
    /// The updates when it changed last.
    pub rescaled_at: u64,
}

impl LossScale {
    /// What the loss is multiplied by for the backward pass of a model in this dtype.
    pub fn of(self, dtype: DType) -> f64 {
        match dtype {
            DType::F16 => f64::from(self.exponent().clamp(0, LARGEST)).exp2(),
            _ => 1.0,
        }
    }

    /// After a step whose loss is finite and whose gradient is not: lowers the scale, and gives whether there was
    /// anything to lower.
    pub fn lower(&mut self, dtype: DType, updates: u64) -> bool {
        if self.of(dtype) <= 1.0 {
            return false;
        }
        self.overflows = self.overflows.saturating_add(1);
        self.rescaled_at = updates;
        true
    }

    /// After an update, which makes them so many: raises the scale if it is time to.
    pub fn raise(&mut self, dtype: DType, updates: u64) {
        let is_due = updates >= self.rescaled_at.saturating_add(GROWS_AFTER);
        if dtype != DType::F16 || !is_due || self.exponent() >= LARGEST {
            return;
        }
        // Below 1 nothing was divided, so it grows from there.
        let below = self.exponent().min(0).saturating_neg();
        self.doublings = self.doublings.saturating_add(below).saturating_add(1);
        self.rescaled_at = updates;
    }

    fn exponent(&self) -> i32 {
        let backoff = self.overflows.saturating_mul(BACKOFF);
        FIRST.saturating_sub(backoff).saturating_add(self.doublings)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A run in this dtype.
    struct Run {
        dtype: DType,
        scale: LossScale,
        updates: u64,
    }

    impl Run {
        fn new(dtype: DType) -> Self {
            Self { dtype, scale: LossScale::default(), updates: 0 }
        }

        /// The scale after so many updates more.
        fn update(&mut self, updates: u64) -> f64 {
            for _ in 0..updates {
                self.updates += 1;
                self.scale.raise(self.dtype, self.updates);
            }
            self.scale.of(self.dtype)
        }

        /// Whether it was lowered, and the scale.
        fn overflow(&mut self) -> (bool, f64) {
            (self.scale.lower(self.dtype, self.updates), self.scale.of(self.dtype))
        }
    }

    #[test]
    fn the_scale_doubles_without_overflows_up_to_a_limit() {
        let mut run = Run::new(DType::F16);
        assert_eq!(run.update(1999), 1024.0);
        assert_eq!(run.update(1), 2048.0);
        assert_eq!(run.update(1999), 2048.0);
        assert_eq!(run.overflow(), (true, 128.0));
        // It is counted from the overflow on.
        assert_eq!(run.update(1999), 128.0);
        assert_eq!(run.update(1), 256.0);
        assert_eq!(run.update(2000 * 40), 16_777_216.0);
    }

    #[test]
    fn the_scale_falls_to_1_and_grows_from_there() {
        let mut run = Run::new(DType::F16);
        for scale in [64.0, 4.0, 1.0] {
            assert_eq!(run.overflow(), (true, scale));
        }
        assert_eq!(run.overflow(), (false, 1.0));
        for scale in [2.0, 4.0] {
            assert_eq!(run.update(2000), scale);
        }
    }

    #[test]
    fn other_dtypes_have_no_scale() {
        for dtype in [DType::F32, DType::BF16] {
            let mut run = Run::new(dtype);
            assert_eq!(run.update(5000), 1.0);
            assert_eq!(run.overflow(), (false, 1.0));
            assert_eq!(run.scale, LossScale::default());
        }
    }

    #[test]
    fn any_numbers_of_a_checkpoint_give_a_scale() {
        for overflows in [i32::MIN, -7, 2, i32::MAX] {
            for doublings in [i32::MIN, 0, i32::MAX] {
                for rescaled_at in [0, u64::MAX] {
                    let scale = LossScale { overflows, doublings, rescaled_at };
                    let mut run = Run { scale, ..Run::new(DType::F16) };
                    let (_, lowered) = run.overflow();
                    for found in [lowered, run.update(2000)] {
                        assert!((1.0..=16_777_216.0).contains(&found), "{scale:?}: {found}");
                    }
                }
            }
        }
    }
}
