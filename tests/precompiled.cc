// Nothing: a program that common headers are precompiled for, with the flags of the tests.
int main() {}
