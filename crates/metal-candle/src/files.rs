//! Reading files with every size checked, and writing them whole or not at all.
