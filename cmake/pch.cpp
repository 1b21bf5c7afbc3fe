// Holds the precompiled header; see pch.h.
