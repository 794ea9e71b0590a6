#ifndef PARAMS_H
#define PARAMS_H
struct Params {
  uint n;
  float scale;
};
#endif
