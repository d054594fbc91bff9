//! Lines of codes, read as integers.

use super::in_order::INTEGERS;
use super::lines::Lines;
use super::registers::MOST_LANES;
use super::{Elements, Levels, x86};
use std::ops::Range;

/// The lines of a matrix whose codes are read as integers times a unit: `unit·integer·scale + offset`. Of tables of other
/// numbers, as NF4's, integers are the nearest ones, with the largest number as [`Self::LARGEST`], which is nearer on average than
/// numbers of bf16 are.
#[derive(Clone, Copy)]
pub struct IntegerLines<'a> {
    lines: Lines<'a>,
    unit: f32,
    /// Those of codes of 4 bits, twice.
    table: [i16; INTEGERS],
}

/// The number that levels are small integers of, if they are.
pub(super) fn unit(levels: Levels) -> Option<f32> {
    match levels {
        Levels::Integers { .. } => Some(1.0),
        Levels::Table(levels) => [1.0, 0.5].into_iter().find(|unit| {
            let integer = |level: &f32| level / unit;
            levels.iter().map(integer).all(|level| level.fract() == 0.0 && level.abs() <= 127.0)
        }),
        Levels::E4m3 => None,
    }
}

impl<'a> IntegerLines<'a> {
    /// The largest integer that a code is read as, of either sign.
    pub const LARGEST: i32 = 2047;

    /// What scales are read in.
    pub const LANES: usize = MOST_LANES;

    /// Of a matrix `depth` wide: `None` where codes are floats, or a line isn't some whole groups and bytes.
    pub fn of(matrix: Elements<'a>, depth: usize) -> Option<Self> {
        if matrix.view.multiplies_integers || matrix.view.registers().is_none() {
            return None;
        }
        let lines = Lines::of(matrix, depth)?;
        let unit = match (unit(lines.levels()), lines.levels()) {
            (Some(unit), _) => unit,
            (None, Levels::Table(levels)) => {
                levels.iter().fold(0f32, |largest, level| largest.max(level.abs()))
                    / Self::LARGEST as f32
            }
            (None, _) => return None,
        };
        let mut table = [0; INTEGERS];
        let levels = lines.levels().of_four_bits().unwrap_or_default();
        for (integer, level) in table.iter_mut().zip(levels.iter().cycle()) {
            *integer = (level * unit.recip()).round_ties_even() as i16;
        }
        Some(IntegerLines { lines, unit, table })
    }

    /// Elements that a scale is for.
    pub fn group(&self) -> usize {
        self.lines.view().group
    }

    pub fn has_offsets(&self) -> bool {
        self.lines.view().has_offsets()
    }

    /// Writes the integers of some elements of a line.
    #[inline(always)]
    pub fn read(&self, line: usize, elements: Range<usize>, target: &mut [i16]) {
        assert!(elements.len() == target.len() && elements.end <= self.lines.depth());
        x86::read_integers(
            self.lines.view(),
            self.unit,
            &self.table,
            self.lines.element(line) + elements.start,
            target,
        );
    }

    /// Writes scales, times the unit, and offsets if there are any, from group `first` of a line on, in whole registers of
    /// [`Self::LANES`].
    pub fn read_scales(&self, line: usize, first: usize, scales: &mut [f32], offsets: &mut [f32]) {
        x86::read_scales(self.lines.view(), self.lines.group(line) + first, scales, offsets);
        for scale in scales {
            *scale *= self.unit;
        }
    }
}
